"""Where every tensor of an engine lies in one allocation, for as long as the engine lives. Pure arithmetic.

    device  inputs | outputs | caches
    host    inputs | outputs            the same offsets, so that a copy needs no other address

A cache is one buffer: input and output at once. A link has no place here: it lies in the pair's memory
(`pair_memory`), and so does the device's side of what the drafter's engine leaves there. Nothing is allocated, moved or
freed after the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark.executors.tensorrt_bindings import ITEM_BYTES, Binding, resolved_shape

__all__ = ["Buffer", "BufferPlan"]

_ALIGNMENT = 256  # bytes, what TensorRT asks for


@dataclass(frozen=True, slots=True)
class Buffer:
    """The place of one tensor."""

    binding: Binding
    offset: int  # -1 = only in the pair's memory
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """Places of all tensors by name, a cache under its input's name."""

    buffers: Mapping[str, Buffer]
    host_bytes: int  # inputs and outputs
    device_bytes: int  # and caches behind them

    @classmethod
    def of(cls, bindings: Sequence[Binding], largest: Mapping[str, int]) -> BufferPlan:
        """Lay out tensors at their largest sizes.

        Arguments:
            largest: sizes of all dimensions, S included.
        """
        buffers: dict[str, Buffer] = {}
        at = host_bytes = 0
        for kind in ("link", "input", "output", "cache"):
            for binding in bindings:
                if binding.kind != kind:
                    continue
                size = ITEM_BYTES[binding.dtype] * math.prod(resolved_shape(binding, largest))
                if kind == "link":
                    buffers[binding.name] = Buffer(binding, -1, size)
                    continue
                # An address of its own even for a tensor without entries.
                buffers[binding.name] = Buffer(binding, at, size)
                at += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
            if kind == "output":
                host_bytes = at
        return cls(buffers, host_bytes, at)
