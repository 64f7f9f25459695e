"""Synthetic drafts with a known truth: confidence logits, and whether each draft would be accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Blocks", "Kind", "draw_blocks"]


@dataclass(frozen=True)
class Kind:
    """A kind of traffic. The true log-odds of position k are normal; the head says `overconfidence` times as much."""

    mean: float  # of the true log-odds at position 1
    fall: float  # per position
    spread: float
    overconfidence: float = 1.0
    shift: float = 0.0  # added to what the head says


@dataclass(frozen=True)
class Blocks:
    logits: npt.NDArray[np.float32]  # [R, G] what the head says
    truth: npt.NDArray[np.float64]  # [R, G] P(accepted | those before it were)
    hit: npt.NDArray[np.bool_]  # [R, G]

    def accepted(self, verify_len: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        run = np.logical_and.accumulate(self.hit, axis=1).sum(axis=1)
        return np.minimum(run, verify_len).astype(np.int32)


def draw_blocks(rng: np.random.Generator, kind: Kind, num_sequences: int, block_size: int) -> Blocks:
    odds = (
        kind.mean
        - kind.fall * np.arange(block_size)
        + kind.spread * rng.normal(size=(num_sequences, block_size))
    )
    truth = 1.0 / (1.0 + np.exp(-odds))
    hit = rng.random(odds.shape) < truth
    return Blocks((kind.overconfidence * odds + kind.shift).astype(np.float32), truth, hit)
