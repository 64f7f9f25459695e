"""Safetensors files, read and written with numpy alone: no torch on the serving path, and bfloat16 works.

A file is an 8-byte little-endian header length, a JSON header naming dtype, shape and byte range of every tensor,
then the bytes. Nothing is loaded before it is asked for. What the names mean is the callers' business.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dspark.errors import CheckpointError

__all__ = ["FloatFormat", "SafetensorsSource", "open_safetensors", "write_tensors"]

FloatFormat = Literal["float16", "bfloat16", "float32"]

_STORED = {  # BF16 is widened by a shift
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "BOOL": "?",
}
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file


class SafetensorsSource:
    """Tensors of one or several safetensors files; a `WeightSource` under the names the files use."""

    def __init__(self, files: Sequence[Path], *, strip_prefix: str = "") -> None:
        """Read the headers and check them.

        Arguments:
            strip_prefix: removed from the front of every name that has it.

        Raises:
            CheckpointError: a damaged file, a tensor found twice, or a dtype that nothing here reads.
        """
        self.files = tuple(files)
        self._entries: dict[str, _Entry] = {}
        for path in self.files:
            for raw_name, entry in _read_header(path).items():
                name = raw_name.removeprefix(strip_prefix)
                if name in self._entries:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} (as {raw_name!r}) is found twice, also in "
                        f"{self._entries[name].path.name}"
                    )
                self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        """Return all names, in the order of the files."""
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def storage_dtype(self, name: str) -> str:
        """Return the dtype in the file, in safetensors' spelling, such as "BF16"."""
        return self._entry(name).dtype

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor widened exactly to float32, C-contiguous, in memory of its own.

        Raises:
            CheckpointError: no such tensor, or not stored as F32, F16 or BF16.
        """
        entry = self._entry(name)
        if entry.dtype not in _FLOATS:
            raise CheckpointError(f"{name}: weights must be one of {', '.join(_FLOATS)}, got {entry.dtype}")
        stored = _read(entry)
        if entry.dtype == "BF16":
            wide = stored.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32)
        return stored.astype(np.float32, copy=False)

    def int32(self, name: str) -> npt.NDArray[np.int32]:
        """Return one integer tensor as int32.

        Raises:
            CheckpointError: no such tensor, not stored as I32 or I64, or values outside int32.
        """
        entry = self._entry(name)
        if entry.dtype not in _INTEGERS:
            raise CheckpointError(
                f"{name}: token ids must be one of {', '.join(_INTEGERS)}, got {entry.dtype}"
            )
        wide = _read(entry).astype(np.int64)
        if wide.size and (wide.min() < -(2**31) or wide.max() >= 2**31):
            raise CheckpointError(f"{name}: values must fit in int32, got {wide.min()} .. {wide.max()}")
        return wide.astype(np.int32)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"no tensor named {name!r} in {_shown(self.files)}") from None


def open_safetensors(folder: Path) -> SafetensorsSource:
    """Open `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises:
        CheckpointError: when neither is there, a shard is missing, or the index and the shards disagree.
    """
    index_path = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if not index_path.is_file():
        if not single.is_file():
            raise CheckpointError(
                f"{folder}: found neither model.safetensors nor model.safetensors.index.json; "
                "weights in another format must be converted to safetensors first"
            )
        return SafetensorsSource([single])
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_text("utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: not a safetensors index ({error!r})") from error
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise CheckpointError(f"{index_path} names the shard {shard!r}, which is not a file in {folder}")
    source = SafetensorsSource([folder / shard for shard in shards])
    missing = sorted(set(weight_map) - set(source.names()))
    extra = sorted(set(source.names()) - set(weight_map))
    if missing or extra:
        raise CheckpointError(
            f"{index_path}: the index and the shards disagree: only in the index {missing[:5]}, "
            f"only in the shards {extra[:5]}"
        )
    return source


def _read(entry: _Entry) -> npt.NDArray[Any]:
    count = math.prod(entry.shape)
    flat = np.fromfile(entry.path, _STORED[entry.dtype], count, offset=entry.start)
    if flat.size != count:
        raise CheckpointError(f"{entry.path}: ends before its last tensor does")
    return flat.reshape(entry.shape)


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    header_bytes = int(data[:8].view("<u8")[0]) if len(data) >= 8 else -1
    if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise CheckpointError(
            f"{path}: not a safetensors file, or cut off (header of {header_bytes} bytes in {len(data)})"
        )
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
        header.pop("__metadata__", None)
        described = {name: _described(at) for name, at in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the safetensors header cannot be read ({error!r})") from error
    entries = {}
    for name, (dtype, shape, begin, end) in described.items():
        if dtype not in _STORED:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {dtype}, allowed are {', '.join(_STORED)}"
            )
        start, stop = 8 + header_bytes + begin, 8 + header_bytes + end
        want = math.prod(shape) * np.dtype(_STORED[dtype]).itemsize
        if end - begin != want or min(begin, *shape, 0) < 0 or stop > len(data):
            raise CheckpointError(
                f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {want} bytes, "
                f"the file gives bytes {begin} to {end} of {len(data) - 8 - header_bytes}"
            )
        entries[name] = _Entry(path, dtype, shape, start)
    return entries


def _described(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape, and first and last byte of one header entry."""
    begin, end = (int(at) for at in entry["data_offsets"])
    return str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), begin, end


def _shown(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"


def write_tensors(
    file: Path, tensors: Mapping[str, npt.NDArray[np.generic]], *, float_format: FloatFormat = "float32"
) -> None:
    """Write one safetensors file; float arrays are stored as `float_format`, int32 arrays as they are.

    Raises:
        CheckpointError: a value that is not finite or does not fit `float_format`, or an array of another
            kind.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs: list[npt.NDArray[np.generic]] = []
    offset = 0
    for name in sorted(tensors):
        dtype, stored = _store(name, tensors[name], float_format)
        header[name] = {
            "dtype": dtype,
            "shape": list(stored.shape),
            "data_offsets": [offset, offset + stored.nbytes],
        }
        blobs.append(stored)
        offset += stored.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for blob in blobs:
            stream.write(np.ascontiguousarray(blob).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def _store(
    name: str, array: npt.NDArray[np.generic], float_format: FloatFormat
) -> tuple[str, npt.NDArray[np.generic]]:
    if array.dtype == np.int32:
        return "I32", array
    if not np.issubdtype(array.dtype, np.floating):
        raise CheckpointError(f"{name}: float or int32 arrays can be written, got {array.dtype}")
    wide = array.astype(np.float32)
    if not np.isfinite(wide).all():
        raise CheckpointError(f"{name}: holds values that are not finite")
    if float_format == "float32":
        return "F32", wide
    if float_format == "float16":
        largest = float(np.abs(wide).max(initial=0.0))
        if largest > float(np.finfo(np.float16).max):
            raise CheckpointError(f"{name}: {largest:g} does not fit float16, use bfloat16 or float32")
        return "F16", wide.astype(np.float16)
    bits = wide.view(np.uint32)
    # Round to nearest, ties to even, before the low half is dropped.
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return "BF16", (rounded >> np.uint32(16)).astype(np.uint16)
