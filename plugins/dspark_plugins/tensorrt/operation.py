"""What a plugin must know of an operation, in plain Python: no TensorRT, no torch, no CUDA.

The inputs, outputs and attributes are those of docs/tensorrt.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.signatures import SIGNATURES

__all__ = ["Buffer", "Fill", "Launch", "Operation", "Port", "Shape"]

Shape = tuple[int, ...]  # -1 = not known while building

FLOATS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output and its type: a fixed one, `act` (the network's own) or `key` (`act` or fp32)."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in device memory, its elements one behind the other."""

    address: int
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a compiled kernel."""

    variant: Variant
    grid: tuple[int, ...]
    arguments: tuple[int | float, ...]  # in the order of the kernel's signature

    @classmethod
    def of(cls, variant: Variant, grid: tuple[int, ...], **values: int | float) -> Launch:
        """Put named arguments in order."""
        names = [name for name, _ in SIGNATURES[variant.kernel]]
        assert set(names) == set(values), (variant.kernel, set(names) ^ set(values))
        return cls(variant, grid, tuple(values[name] for name in names))


@dataclass(frozen=True, slots=True)
class Fill:
    """Zeros in device memory."""

    address: int
    num_words: int  # of 4 bytes


class Operation(ABC):
    """One node of the graph.

    Arguments:
        values: the node's attributes by name; what is not of this operation is left aside.

    Raises:
        ValueError: an attribute is missing.
    """

    name: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]]
    aliases: ClassVar[Mapping[int, int]] = {}  # output -> the input whose memory it is
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def __init__(self, values: Mapping[str, int | float]) -> None:
        missing = [name for name in self.attributes if name not in values]
        if missing:
            raise ValueError(f"{self.name}: the node must have the attributes {', '.join(missing)}")
        self.values = {name: values[name] for name in self.attributes}

    def number(self, name: str) -> int:
        """Return an attribute that is a whole number."""
        return int(self.values[name])

    @abstractmethod
    def output_shapes(self, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return the outputs' shapes from the inputs'; sizes are only added, multiplied and passed on."""

    @abstractmethod
    def variants(self, shapes: Sequence[Shape], dtypes: Sequence[str]) -> list[Variant]:
        """Return every form of a kernel that `launches` may choose at any size of the unknown dimensions.

        Raises:
            ValueError: sizes that decide a form are unknown or do not fit together.
        """

    @abstractmethod
    def scratch(self, shapes: Sequence[Shape]) -> tuple[int, ...]:
        """Return the bytes of every piece of scratch memory, never less for smaller shapes than they need."""

    @abstractmethod
    def launches(
        self,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        scratch: Sequence[int],
        num_multiprocessors: int,
    ) -> Iterator[Launch | Fill]:
        """Yield what to start, in order; `scratch` are addresses."""

    def accepts(self, at: int, dtypes: Sequence[str]) -> bool:
        """Return whether the type of port `at` (inputs, then outputs) fits those of the ports before it."""
        ports = (*self.inputs, *self.outputs)
        wanted, given = ports[at].dtype, dtypes[at]
        if wanted not in ("act", "key"):
            return given == wanted
        if given not in FLOATS:
            return False
        before = {ports[i].dtype: dtypes[i] for i in range(at)}
        other = before.get("key" if wanted == "act" else "act")
        keys, act = (other, given) if wanted == "act" else (given, other)
        fits = keys is None or act is None or keys in (act, "fp32")
        return fits and before.get(wanted, given) == given

    def output_dtypes(self, inputs: Sequence[str]) -> list[str]:
        """Return the outputs' types from the inputs'."""
        act = next((t for port, t in zip(self.inputs, inputs, strict=True) if port.dtype == "act"), "fp32")
        return [act if port.dtype == "act" else port.dtype for port in self.outputs]

    def check(self, holds: bool, what: str) -> None:
        """Raise ValueError, saying what must hold, unless it does."""
        if not holds:
            raise ValueError(f"{self.name}: {what}")
