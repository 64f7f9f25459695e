"""Context rows that wait until a block is drafted, or until there are many: a few at a time cost several times as much.

Where load lets nobody draft, every step commits a row of each sequence that no block reads for long. Written together,
256 rows take seven times as long as 16, not sixteen times.
"""

from __future__ import annotations

import numpy as np

from dspark.executors.interface import Float32, Int32

__all__ = ["WaitingRows"]

_MOST = 256  # rows that wait


class WaitingRows:
    """Rows in the order they came."""

    def __init__(self) -> None:
        self._parts: list[tuple[Float32, Int32, Int32]] = []
        self._num_rows = 0

    @property
    def full(self) -> bool:
        """Whether there are so many that they should be written."""
        return self._num_rows >= _MOST

    def add(self, features: Float32, positions: Int32, slots: Int32) -> None:
        """Take rows [N, m*d] with positions [N] and slots [N]; the arrays must not change any more."""
        self._parts.append((features, positions, slots))
        self._num_rows += len(slots)

    def take(self) -> tuple[Float32, Int32, Int32] | None:
        """Return all rows and forget them, None for none; of rows for one slot the last, since pages change hands."""
        parts, self._parts, self._num_rows = self._parts, [], 0
        if len(parts) <= 1:
            return parts[0] if parts else None
        features, positions, slots = (np.concatenate(column) for column in zip(*parts, strict=True))
        once, last = np.unique(slots[::-1], return_index=True)
        if len(once) == len(slots):
            return features, positions, slots
        kept = len(slots) - 1 - last
        return features[kept], positions[kept], slots[kept]
