"""Weights of an ONNX model in a file beside it, written one tensor at a time."""

from __future__ import annotations

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
        stream: the open file.
        name: the name it will have beside the model.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.tensors: list[TensorProto] = []

    def add(self, name: str, array: npt.NDArray[Any], element_type: int) -> str:
        """Append a tensor and return its name."""
        at = self._stream.tell()
        self._stream.write(b"\0" * (-at % _ALIGNMENT))
        offset = self._stream.tell()
        data = np.ascontiguousarray(array).tobytes()
        self._stream.write(data)
        tensor = TensorProto(name=name, data_type=element_type, dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", self._name), ("offset", offset), ("length", len(data))):
            tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))
        self.tensors.append(tensor)
        return name

    def share(self, tensor: TensorProto) -> None:
        """Take a tensor whose data lies in another file beside the model."""
        self.tensors.append(tensor)
