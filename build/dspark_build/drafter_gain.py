"""Is one drafter accepted further than another? Both decoded the same prompts, which are drawn anew to tell chance.

Blocks of one prompt are alike, so whole prompts are drawn; each brings its blocks of both drafters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark_build.block_records import BlockRecords

__all__ = ["Gain", "gain_of"]

Array = npt.NDArray[np.float64]

LEAST_PROMPTS = 5  # with fewer, all of them agree too often by chance
_RESAMPLES = 4000
_TAIL = 0.05  # on either side of the interval
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Accepted length of the new drafter over that of the served one, less 1, with the interval that holds 90 %."""

    mean: float  # NaN where nothing could be compared
    low: float
    high: float
    num_prompts: int

    @property
    def is_sure(self) -> bool:
        """True where a gain is more than chance."""
        return self.num_prompts >= LEAST_PROMPTS and self.low > 0.0

    @property
    def is_loss(self) -> bool:
        """True where a loss is more than chance."""
        return self.num_prompts >= LEAST_PROMPTS and self.high < 0.0

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "no prompt was answered with full blocks of both drafters"
        return (
            f"{self.mean:+.1%} (90% interval {self.low:+.1%} to {self.high:+.1%}, {self.num_prompts} prompts)"
        )


def gain_of(served: BlockRecords, new: BlockRecords) -> Gain:
    """Compare two drafters over the prompts that both have blocks of; a block's `source` names its prompt."""
    prompts = np.intersect1d(served.source, new.source)
    if not len(prompts):
        return Gain(mean=math.nan, low=math.nan, high=math.nan, num_prompts=0)
    before, after = _sums(served, prompts), _sums(new, prompts)
    drawn = np.random.default_rng(_SEED).integers(len(prompts), size=(_RESAMPLES, len(prompts)))
    gains = _lengths(after[drawn]) / _lengths(before[drawn]) - 1.0
    low, high = np.quantile(gains, [_TAIL, 1.0 - _TAIL])
    mean = float(_lengths(after) / _lengths(before)) - 1.0
    return Gain(mean=mean, low=float(low), high=float(high), num_prompts=len(prompts))


def _sums(records: BlockRecords, prompts: npt.NDArray[np.str_]) -> Array:
    """Return tokens and blocks of each prompt [P, 2]."""
    at = np.searchsorted(prompts, records.source)
    known = np.isin(records.source, prompts)
    tokens = np.bincount(at[known], weights=records.accepted[known] + 1.0, minlength=len(prompts))
    blocks = np.bincount(at[known], minlength=len(prompts))
    return np.stack([tokens, blocks], -1).astype(np.float64)


def _lengths(sums: Array) -> Array:
    """Return tokens a block over the next to last axis: [..., P, 2] -> [...]."""
    total = sums.sum(-2)
    return np.asarray(total[..., 0] / total[..., 1])
