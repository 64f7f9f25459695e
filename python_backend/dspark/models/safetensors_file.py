"""Reads safetensors files without torch; nothing is loaded before it is asked for.

Knows the container only; what the names mean is the callers' business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.errors import CheckpointError

__all__ = ["SafetensorsSource", "open_safetensors"]

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file


class SafetensorsSource:
    """Tensors of one or several safetensors files; a `WeightSource` under the names the files use."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the headers and check them.

        Raises:
            CheckpointError: for a damaged file, a tensor that two files hold, or a dtype other than F32, F16,
                BF16.
        """
        self.files = tuple(files)
        self._entries: dict[str, _Entry] = {}
        for path in self.files:
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is also in another file of this checkpoint"
                    )
                self._entries[name] = entry

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def storage_dtype(self, name: str) -> str:
        """Return the dtype in the file: F32, F16 or BF16."""
        return self._entry(name).dtype

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor widened exactly to float32, C-contiguous, in memory of its own.

        Raises:
            CheckpointError: when there is no tensor of this name.
        """
        entry = self._entry(name)
        stored = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.dtype]
        raw = np.fromfile(entry.path, stored, math.prod(entry.shape), offset=entry.start)
        if entry.dtype == "BF16":
            wide = raw.astype(np.uint32)
            wide <<= 16
            values = wide.view(np.float32)
        else:
            values = raw.astype(np.float32, copy=False)
        return values.reshape(entry.shape)

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
        if dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"{path}: tensor {name!r} has dtype {dtype}, allowed are {', '.join(_ITEM_BYTES)}"
            )
        start, stop = 8 + header_bytes + begin, 8 + header_bytes + end
        want = math.prod(shape) * _ITEM_BYTES[dtype]
        if end - begin != want or begin < 0 or stop > len(data):
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
