"""Cosines and sines of every position a pass may ask for, made once and grown when needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["RopeTable"]

Float32 = npt.NDArray[np.float32]


class RopeTable:
    """Tables [positions, head_dim / 2] float32.

    The angle is the float32 product of position and frequency, as in the torch executor; its cosine and
    sine are taken in float64 and rounded once.

    Arguments:
        frequencies: [head_dim / 2] float32 inverse frequencies.
        factor: multiplies both tables (YaRN).
    """

    def __init__(self, frequencies: Float32, factor: float) -> None:
        self._frequencies, self._factor = frequencies, factor
        self.cos: Float32 = np.empty((0, len(frequencies)), np.float32)
        self.sin: Float32 = self.cos

    def reach(self, num_positions: int) -> None:
        """Make both tables at least `num_positions` long."""
        have = len(self.cos)
        if num_positions <= have:
            return
        positions = np.arange(have, max(num_positions, 2 * have, 2048), dtype=np.float32)
        angles = (positions[:, None] * self._frequencies).astype(np.float64)
        self.cos = np.concatenate([self.cos, (np.cos(angles) * self._factor).astype(np.float32)])
        self.sin = np.concatenate([self.sin, (np.sin(angles) * self._factor).astype(np.float32)])
