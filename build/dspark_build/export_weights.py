"""Weights of an ONNX model in a file beside it, written one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

__all__ = ["WeightFile"]

_ALIGNMENT = 4096  # bytes, so that tensors can be mapped


class WeightFile:
    """Takes tensors, gives initializers that point into the file.

    Arguments:
        stream: the open file, empty.
        name: the name it will have beside the model.
        tell: called with the name of every tensor that was written.
    """

    def __init__(self, stream: BinaryIO, name: str, tell: Callable[[str], None] | None = None) -> None:
        self._stream, self.name, self._tell = stream, name, tell
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.tensors: list[TensorProto] = []

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._digest.hexdigest()

    def add(self, name: str, array: npt.NDArray[Any], element_type: int) -> str:
        """Append a tensor and return its name."""
        self._write(b"\0" * (-self.num_bytes % _ALIGNMENT))
        offset = self.num_bytes
        data = np.ascontiguousarray(array).tobytes()
        self._write(data)
        tensor = TensorProto(name=name, data_type=element_type, dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self.name), ("offset", offset), ("length", len(data))):
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
        self.tensors.append(tensor)
        if self._tell is not None:
            self._tell(name)
        return name

    def share(self, tensor: TensorProto) -> None:
        """Take a tensor whose data lies in another file beside the model."""
        self.tensors.append(tensor)

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)
