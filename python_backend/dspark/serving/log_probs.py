"""Log probabilities as they stand on the wire.

The JSON form is the one that clients of vLLM's model read: for each token an object from token id to its
figures, the token's own first. `bytes` is added, since half a character cannot be told as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from dspark.request import TokenLogProb

__all__ = ["log_prob_values"]


def log_prob_values(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogProb],
    token_bytes: Callable[[int], bytes] | None,
    *,
    before: float,
) -> dict[str, object]:
    """Return the log probability outputs of one answer.

    Arguments:
        token_ids: of this answer.
        entries: one for each of them.
        token_bytes: None leaves texts out.
        before: log probability of the answers before this one.
    """
    total = before + sum(entry.log_prob for entry in entries)
    rows = [_row(token_id, entry, token_bytes) for token_id, entry in zip(token_ids, entries, strict=True)]
    return {
        "cum_log_probs": total,
        "output_log_probs": [entry.log_prob for entry in entries],
        "cumulative_logprob": total,
        "logprobs": json.dumps(rows).encode(),
    }


def _row(
    token_id: int, entry: TokenLogProb, token_bytes: Callable[[int], bytes] | None
) -> dict[str, dict[str, object]]:
    figures = {token_id: (entry.log_prob, entry.rank)}
    for rank, (other, log_prob) in enumerate(entry.top, start=1):
        figures.setdefault(other, (log_prob, rank))
    row: dict[str, dict[str, object]] = {}
    for one, (log_prob, rank) in figures.items():
        row[str(one)] = {"logprob": log_prob, "rank": rank}
        if token_bytes is not None:
            raw = token_bytes(one)
            row[str(one)].update(decoded_token=raw.decode("utf-8", "replace"), bytes=list(raw))
    return row
