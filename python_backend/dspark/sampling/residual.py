"""What a target distribution p has over the distribution q that a draft was drawn from."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dspark.sampling.distribution import Distribution

__all__ = ["probs_at", "residual"]

Float64 = npt.NDArray[np.float64]


def residual(
    p: Distribution, q: Distribution | None, draft: int, weight: float = 1.0, *, out: Float64 | None = None
) -> Float64:
    """Return max(weight * p - q, 0) on p's support, not normalised; float64 [len(p.probs)].

    Arguments:
        q: None = one-hot at `draft`.
        weight: in [0, 1].
        out: where it is put, as long as p's support; None = into an array of the caller's own.
    """
    left = np.multiply(p.probs, weight, out=out)
    if q is None:
        entry = draft if p.token_ids is None else int(np.searchsorted(p.token_ids, draft))
        if p.token_ids is None or (entry < len(left) and p.token_ids[entry] == draft):
            left[entry] = 0.0
        return left
    left -= probs_at(q, p)
    return np.maximum(left, 0.0, out=left)


def probs_at(q: Distribution, p: Distribution) -> Float64:
    """Return q on p's support, [len(p.probs)]; not to be written to."""
    if q.token_ids is None:
        return q.probs if p.token_ids is None else q.probs[p.token_ids]
    at = np.zeros(len(p.probs))
    if p.token_ids is None:
        at[q.token_ids] = q.probs
    else:
        _, in_p, in_q = np.intersect1d(p.token_ids, q.token_ids, assume_unique=True, return_indices=True)
        at[in_p] = q.probs[in_q]
    return at
