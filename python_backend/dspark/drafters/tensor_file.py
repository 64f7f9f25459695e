"""Safetensors folders, read and written with numpy alone: no torch on the serving path, and bfloat16 works.

A file is an 8-byte little-endian header length, a JSON header naming dtype, shape and byte range of every
tensor, then the bytes. Knows nothing of drafters.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from dspark.errors import CheckpointError

__all__ = ["FloatFormat", "TensorFolder", "write_tensors"]

FloatFormat = Literal["float16", "bfloat16", "float32"]

_READ: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,  # widened by a shift
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")
_MAX_HEADER_BYTES = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class TensorFolder:
    """Every tensor of the `*.safetensors` files of one folder; a `WeightSource`. Reads lazily, caches
    nothing.

    Arguments:
        folder: where the files are.
        strip_prefix: removed from the front of every name that has it.

    Raises:
        CheckpointError: no file, a damaged file, or a name found twice.
    """

    def __init__(self, folder: Path, *, strip_prefix: str = "") -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: a checkpoint needs *.safetensors files, found none")
        self._entries: dict[str, _Entry] = {}
        for file in files:
            for raw_name, entry in _read_header(file).items():
                name = raw_name.removeprefix(strip_prefix)
                if name in self._entries:
                    raise CheckpointError(
                        f"{name}: found twice, in {self._entries[name].file.name} and {file.name} "
                        f"(as {raw_name})"
                    )
                self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted."""
        return tuple(sorted(self._entries))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor without reading it."""
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """Return the stored dtype of one tensor in safetensors' spelling, such as "BF16"."""
        return self._entry(name).dtype

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """Return one float tensor widened to float32, C-contiguous, as a fresh array.

        Raises:
            CheckpointError: no such tensor, or not stored as F32, F16 or BF16.
        """
        entry = self._entry(name)
        if entry.dtype not in _FLOATS:
            raise CheckpointError(f"{name}: weights must be one of {', '.join(_FLOATS)}, got {entry.dtype}")
        stored = _read(entry)
        if entry.dtype == "BF16":
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.array(stored, np.float32, order="C")

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
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{name}: no such tensor in the checkpoint")
        return entry


def _read(entry: _Entry) -> npt.NDArray[np.generic]:
    count = math.prod(entry.shape)
    flat = np.fromfile(entry.file, dtype=_READ[entry.dtype], count=count, offset=entry.offset)
    if flat.size != count:
        raise CheckpointError(f"{entry.file}: ends before its last tensor does")
    return flat.reshape(entry.shape)


def _read_header(file: Path) -> dict[str, _Entry]:
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size_bytes - 8):
            raise CheckpointError(f"{file}: not a safetensors file (header of {header_bytes} bytes)")
        try:
            header = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            entries = {name: _entry_of(file, 8 + header_bytes, name, item) for name, item in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file}: damaged safetensors header ({error})") from error
    for name, entry in entries.items():
        end = entry.offset + math.prod(entry.shape) * np.dtype(_READ[entry.dtype]).itemsize
        if end > size_bytes:
            raise CheckpointError(f"{file}: {name} ends at byte {end}, the file has {size_bytes}")
    return entries


def _entry_of(file: Path, data_start: int, name: str, item: Mapping[str, object]) -> _Entry:
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if dtype not in _READ:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, readable are {', '.join(_READ)}")
    if not isinstance(shape, list) or not isinstance(offsets, list) or min([0, *shape, *offsets]) < 0:
        raise ValueError(f"{name}: shape {shape}, data_offsets {offsets}")
    length = math.prod(shape) * np.dtype(_READ[str(dtype)]).itemsize
    if offsets[1] - offsets[0] != length:
        raise ValueError(f"{name}: shape {shape} needs {length} bytes, data_offsets give {offsets}")
    return _Entry(file, str(dtype), tuple(shape), data_start + offsets[0])


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
