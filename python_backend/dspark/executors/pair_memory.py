"""Memory of tensors that one engine of a pair writes and the other reads; whichever comes first has it allocated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

__all__ = ["PairMemory", "host_pair_memory"]


class PairMemory:
    """Addresses by name; they stay as long as this lives.

    Arguments:
        allocate: gives the address of so many bytes, told what they are for.
    """

    def __init__(self, allocate: Callable[[str, int], int]) -> None:
        self._allocate = allocate
        self.places: dict[str, tuple[int, int]] = {}  # address, bytes

    def address(self, name: str, num_bytes: int) -> int:
        """Return where a tensor lies, the same for both engines.

        Raises:
            CapacityError: there is not that much memory.
        """
        if name not in self.places:
            self.places[name] = self._allocate(name, num_bytes), num_bytes
        address, there = self.places[name]
        assert there == num_bytes, f"{name}: one engine asks for {there} bytes, the other for {num_bytes}"
        return address


def host_pair_memory() -> PairMemory:
    """Return memory of this process."""
    held: list[npt.NDArray[np.uint8]] = []

    def allocate(_: str, num_bytes: int) -> int:
        held.append(np.zeros(max(num_bytes, 1), np.uint8))
        return held[-1].ctypes.data

    return PairMemory(allocate)
