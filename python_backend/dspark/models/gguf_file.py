"""Reads the GGUF container: metadata, tensor table, dequantisation. Knows no model.

The tables of types and block sizes and the block arithmetic are the `gguf` package's. The header is read
here, because that package's reader makes several numpy arrays for every string of the vocabulary (seconds and
hundreds of megabytes where this takes a tenth of a second).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import quants

from dspark.errors import CheckpointError

__all__ = ["GgufFile", "GgufTensor"]

_SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_CHUNK_BYTES = 1 << 18  # quantised bytes dequantised at a time: the intermediates stay in the cache
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is row-major: [out, in] for matrices."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int  # bytes from the beginning of the file
    num_bytes: int


class GgufFile:
    """A GGUF file: its header in memory, its tensors read when asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: for a damaged file, a version other than 2 or 3, one part of a split model, or a
                tensor of a type that is not supported.
        """
        self.path = path
        try:
            data = np.memmap(path, np.uint8, "r")  # let go of after the header
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        try:
            self.metadata, self.tensors, self.header_bytes = _read(data)
        except (struct.error, UnicodeDecodeError, IndexError, KeyError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{path}: the GGUF header cannot be read ({error})") from error
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise CheckpointError(
                f"{path}: split.count is {parts}, allowed is 1: merge the parts into one file first"
            )
        for tensor in self.tensors.values():
            self._check(tensor, len(data))

    def _check(self, tensor: GgufTensor, file_bytes: int) -> None:
        if tensor.type_name not in _SUPPORTED:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} is of type {tensor.type_name}, "
                f"allowed are {', '.join(_SUPPORTED)}"
            )
        if tensor.num_bytes < 0 or tensor.start + tensor.num_bytes > file_bytes:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} of shape {list(tensor.shape)} and type "
                f"{tensor.type_name} ends at byte "
                f"{tensor.start + tensor.num_bytes}, the file has {file_bytes}"
            )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of one tensor, in memory of their own."""
        tensor = self._tensor(name)
        return np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.start)

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """Return one tensor widened or dequantised to float32, C-contiguous, in memory of its own.

        Raises:
            CheckpointError: when there is no tensor of this name.
        """
        tensor = self._tensor(name)
        raw = self.raw(name)
        if tensor.type_name == "F32":
            flat = raw.view("<f4").astype(np.float32, copy=False)
        elif tensor.type_name == "F16":
            flat = raw.view("<f2").astype(np.float32)
        else:
            flat = _dequantise(raw, tensor)
        return flat.reshape(tensor.shape)

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor named {name!r}") from None


def _dequantise(raw: npt.NDArray[np.uint8], tensor: GgufTensor) -> npt.NDArray[np.float32]:
    block_len, block_bytes = _block(tensor.type_name)
    to_float: Callable[[Any], Any] = getattr(quants, tensor.type_name).dequantize_blocks
    blocks = raw.reshape(-1, block_bytes)
    flat = np.empty((len(blocks), block_len), np.float32)
    step = max(1, _CHUNK_BYTES // block_bytes)
    with np.errstate(invalid="ignore"):  # a NaN scale stays a NaN
        for at in range(0, len(blocks), step):
            flat[at : at + step] = to_float(np.asarray(blocks[at : at + step])).reshape(-1, block_len)
    return flat


def _block(type_name: str) -> tuple[int, int]:
    """Return the elements and the bytes of one block."""
    length, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return int(length), int(size)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def scalar(self, kind: str) -> Any:
        value = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += struct.calcsize(kind)
        return value

    def string(self) -> str:
        return self._bytes(self.scalar("Q")).decode("utf-8")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.scalar(_SCALARS[type_id])
        item_type, count = self.scalar("I"), self.scalar("Q")
        if item_type in (_STRING, _ARRAY):
            return self._objects(item_type, count)
        kind = f"<{count}{_SCALARS[item_type]}"
        values = list(struct.unpack_from(kind, self.data, self.at))
        self.at += struct.calcsize(kind)
        return values

    def _objects(self, item_type: int, count: int) -> list[Any]:
        if count > len(self.data):
            raise ValueError(f"an array of {count} entries in a file of {len(self.data)} bytes")
        return [self.value(item_type) for _ in range(count)]

    def _bytes(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise ValueError(f"a string of {count} bytes at byte {self.at} of {len(self.data)}")
        taken = bytes(self.data[self.at : self.at + count])
        self.at += count
        return taken


def _read(data: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
    cursor = _Cursor(memoryview(data))  # type: ignore[arg-type]
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"it starts with {bytes(data[:4])!r}, not with b'GGUF'")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, allowed are 2 and 3 (little-endian)")
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    table = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, allowed is a power of two")
    body = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, type_name, offset in table:
        if name in tensors:
            raise ValueError(f"the tensor {name!r} is there twice")
        tensors[name] = GgufTensor(name, shape, type_name, body + offset, _num_bytes(shape, type_name))
    return metadata, tensors, body


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string()
    reversed_shape = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        type_name = gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        type_name = f"number {type_id}"
    return name, tuple(reversed(reversed_shape)), type_name, offset


def _num_bytes(shape: Sequence[int], type_name: str) -> int:
    if type_name not in _SUPPORTED:
        return 0  # refused by name afterwards
    block_len, block_bytes = _block(type_name)
    if not shape or shape[-1] % block_len:
        raise ValueError(
            f"rows of {shape[-1] if shape else 0} elements in blocks of {block_len} ({type_name})"
        )
    return math.prod(shape) // block_len * block_bytes
