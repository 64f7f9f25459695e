"""Which tokens of a row can be drawn at all: top-k, then top-p, then min-p.

All three keep a prefix of the tokens in the order "likelier first, lower id first among equals", so the
likeliest token always stays and the answer never depends on how a sort breaks ties. None of them sorts the
vocabulary: each finds a bound that provably keeps enough tokens, and sorts what is left.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["truncate"]

Float32 = npt.NDArray[np.float32]
Kept = npt.NDArray[np.intp]

_BLOCK = 64  # tokens per block of the top-k bound
_FIRST_TRY = 256.0  # the first top-p floor over the exact one


def truncate(scaled: Float32, *, top_k: int, top_p: float, min_p: float) -> Kept | None:
    """Return the entries that stay, ascending, or None when all do.

    Arguments:
        scaled: [n] logits over temperature, shifted so that the largest is 0.
        top_k: keep the k likeliest; 0 = all. Exactly k stay when there are as many (lowest ids among equals).
        top_p: of those, keep the fewest likeliest whose share reaches top_p.
        min_p: of those, keep the ones at least min_p times as likely as the likeliest.
    """
    kept: Kept | None = None
    if 0 < top_k < len(scaled):
        kept = _top_k(scaled, top_k)
    if top_p < 1.0:
        values = scaled if kept is None else scaled[kept]
        inside = _top_p(np.exp(values), top_p)
        kept = inside if kept is None else kept[inside]
    if min_p > 0.0:
        values = scaled if kept is None else scaled[kept]
        inside = np.flatnonzero(values >= np.float32(math.log(min_p)))
        kept = inside if kept is None else kept[inside]
    return kept


def _top_k(scaled: Float32, k: int) -> Kept:
    num_blocks = len(scaled) // _BLOCK
    if k <= num_blocks // 2:
        # At least k tokens reach the k-th largest block maximum, so the k-th largest token does.
        maxima = scaled[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(axis=1)
        bound = np.partition(maxima, num_blocks - k)[num_blocks - k]
        candidates = np.flatnonzero(scaled >= bound)
    else:
        candidates = np.arange(len(scaled))
    values = scaled[candidates]
    cutoff = np.partition(values, len(values) - k)[len(values) - k]
    return _first_k(candidates, values, cutoff, k)


def _top_p(weights: Float32, top_p: float) -> Kept:
    """Return the entries inside the nucleus, ascending; `weights` [n] need not sum to 1."""
    total = float(weights.sum(dtype=np.float64))
    wanted = top_p * total
    # All tokens below this floor together weigh less than what may stay outside.
    floor = (1.0 - top_p) * total / len(weights) * (1.0 - 1e-6)
    for bound in (floor * _FIRST_TRY, floor):
        candidates = np.flatnonzero(weights >= bound)
        values = weights[candidates]
        descending = np.sort(values)[::-1]
        cumulative = descending.cumsum(dtype=np.float64)
        if len(cumulative) and cumulative[-1] >= wanted:
            break
    k = min(int(np.searchsorted(cumulative, wanted)) + 1, len(candidates))
    return _first_k(candidates, values, descending[k - 1], k)


def _first_k(candidates: Kept, values: Float32, cutoff: np.float32, k: int) -> Kept:
    """Keep the k largest values, of which `cutoff` is the smallest; the earliest among those equal to it."""
    above = values > cutoff
    missing = k - int(np.count_nonzero(above))
    above[np.flatnonzero(values == cutoff)[:missing]] = True
    return candidates[above]
