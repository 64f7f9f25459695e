"""Log probabilities of committed tokens, under the target's own distribution: no temperature, no mask, no penalty.

Read from the very rows that judged the drafts, so an accepted draft's is the target's, never the drafter's, and the
same as without speculation.
"""

from __future__ import annotations

import numpy as np

from dspark.executors.interface import Float32
from dspark.request import TokenLogProb

__all__ = ["token_log_probs"]


def token_log_probs(
    logits: Float32, token_ids: tuple[int, ...], *, num_alternatives: int
) -> tuple[TokenLogProb, ...]:
    """Return one entry per token.

    Arguments:
        logits: [n, V] float32, n at least len(token_ids); row k is the one that token k was drawn from.
        num_alternatives: likeliest tokens to tell of each row; among equals the lowest id first.
    """
    return tuple(
        _entry(row, token_id, num_alternatives)
        for row, token_id in zip(logits[: len(token_ids)], token_ids, strict=True)
    )


def _entry(row: Float32, token_id: int, num_alternatives: int) -> TokenLogProb:
    wide = row.astype(np.float64)
    top = wide.max()
    total = top + np.log(np.exp(wide - top).sum())
    count = min(num_alternatives, len(row))
    alternatives: tuple[tuple[int, float], ...] = ()
    if count:
        # All that are at least as likely as the count-th: ties are cut by id, not by chance.
        bound = np.partition(wide, len(row) - count)[len(row) - count]
        ids = np.flatnonzero(wide >= bound)
        ids = ids[np.argsort(-wide[ids], kind="stable")][:count]
        alternatives = tuple((int(one), float(wide[one] - total)) for one in ids)
    return TokenLogProb(
        log_prob=float(wide[token_id] - total),
        rank=int(np.count_nonzero(wide > wide[token_id])) + 1,
        top=alternatives,
    )
