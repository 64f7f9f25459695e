"""Whether to draft at all, per sequence and per load: drafting is paid before anyone knows what it brings.

Pure functions over arrays. What a block may bring is given as samples of its survival from earlier steps,
so that the freedom to keep only a good one is part of its worth.
"""

from __future__ import annotations

import numpy as np

from dspark.scheduling.interface import Bool, Float64

__all__ = ["plan_drafting"]

_MARGIN = 1.01  # drafting must promise this much more than not drafting
_EXACT = 512  # up to this many candidates per sample the stopping point is searched, beyond it is estimated


def plan_drafting(
    samples: Float64, eligible: Bool, *, num_sequences: int, verify_s: Float64, draft_s: Float64
) -> Bool:
    """Choose the sequences worth drafting.

    Tried are all, none, and those whose block is worth more than its own share of the drafting time at the
    throughput of the better of the two.

    Arguments:
        samples: [S, R, G] survivals of earlier blocks, 0 past what may be drafted.
        eligible: [R] sequences that may draft at all.
        num_sequences: R.
        verify_s: [>= R*G + 1] seconds of the target pass with 0, 1, ... drafts.
        draft_s: [R] seconds of drafting 1, 2, ... blocks.

    Returns:
        bool [R].
    """
    none = np.zeros(num_sequences, np.bool_)
    num_eligible = int(eligible.sum())
    if num_eligible == 0:
        return none
    plain = num_sequences / float(verify_s[0])
    all_rate, num_kept = _rate(
        samples[:, eligible], num_sequences, verify_s, float(draft_s[num_eligible - 1])
    )
    rate = max(plain, all_rate)
    reach = max(num_kept, min(num_sequences, len(verify_s) - 1), 1)
    row_s = float(verify_s[reach] - verify_s[0]) / reach
    half = num_eligible // 2
    block_s = float(draft_s[num_eligible - 1] - (draft_s[half - 1] if half else 0.0)) / (num_eligible - half)
    net = np.cumsum(samples - rate * row_s, axis=2)  # [S, R, G] tokens beyond what their rows cost
    worth = np.maximum(net.max(axis=2), 0.0).mean(axis=0)  # [R]
    few = eligible & (worth > rate * block_s)
    best, chosen = plain * _MARGIN, none
    if all_rate > best:
        best, chosen = all_rate, eligible
    num_few = int(few.sum())
    if 0 < num_few < num_eligible:
        few_rate, _ = _rate(samples[:, few], num_sequences, verify_s, float(draft_s[num_few - 1]))
        if few_rate > best:
            chosen = few
    return chosen


def _rate(samples: Float64, num_sequences: int, verify_s: Float64, draft_s: float) -> tuple[float, int]:
    """Return the mean throughput when these blocks [S, n, G] are drafted, and the drafts kept of one step."""
    num_samples = len(samples)
    flat = samples.reshape(num_samples, -1)
    num = flat.shape[1]
    if num <= _EXACT:
        ordered = -np.sort(-flat, axis=1)
        tokens = num_sequences + np.cumsum(ordered, axis=1)
        theta = tokens / (verify_s[1 : num + 1] + draft_s)
        rates = np.maximum(theta.max(axis=1), num_sequences / (float(verify_s[0]) + draft_s))
        kept = int(np.where(theta.max(axis=1) >= rates, theta.argmax(axis=1) + 1, 0).mean())
        return float(rates.mean()), kept
    # Many candidates: the sample of one step is representative, and the value to stop at is found by halving.
    one = flat[0]
    row_s = float(verify_s[num] - verify_s[0]) / num
    rate, kept = num_sequences / (float(verify_s[0]) + draft_s), 0
    for _ in range(4):
        keep = one > rate * row_s
        kept = int(keep.sum())
        new = (num_sequences + float(one[keep].sum())) / (float(verify_s[kept]) + draft_s)
        if new <= rate:
            break
        rate = new
        row_s = float(verify_s[kept] - verify_s[0]) / kept if kept else row_s
    return rate, kept
