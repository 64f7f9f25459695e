"""Whether to draft at all, per sequence and per load: drafting is paid before anyone knows what it brings.

Pure functions over arrays. What a block may bring is given as samples of its survival from earlier steps,
so that the freedom to keep only a good one is part of its worth.
"""

from __future__ import annotations

import numpy as np

from dspark.scheduling.allocation import early_stop_nums
from dspark.scheduling.interface import Bool, Float64

__all__ = ["MARGIN", "plan_drafting"]

MARGIN = 1.03  # drafting must promise this much more than not drafting, whatever is known
_MANY = 256  # candidates beyond which one sample is enough


def plan_drafting(
    samples: Float64,
    eligible: Bool,
    *,
    num_sequences: int,
    verify_s: Float64,
    draft_s: Float64,
    early_stop: bool = False,
    margin: float = MARGIN,
) -> tuple[Bool, float]:
    """Choose the sequences worth drafting, and say how many times the throughput without any is promised.

    Tried are all, none, and those whose block is worth more than its own share of the drafting time at the
    throughput of the better of the two.

    Arguments:
        samples: [S, R, G] survivals of earlier blocks, 0 past what may be drafted.
        eligible: [R] sequences that may draft at all.
        num_sequences: R.
        verify_s: [>= R*G + 1] seconds of the target pass with 0, 1, ... drafts.
        draft_s: [>= number eligible] seconds of drafting 1, 2, ... blocks.
        early_stop: drafts are going to be taken only up to the first that does not raise the throughput.
        margin: what drafting must promise, in times the throughput without.

    Returns:
        bool [R], and the promise: 1 with nobody.
    """
    none = np.zeros(num_sequences, np.bool_)
    num_eligible = int(eligible.sum())
    if num_eligible == 0:
        return none, 1.0
    plain = num_sequences / float(verify_s[0])
    everyone = samples if num_eligible == num_sequences else samples[:, eligible]
    all_rate, num_kept = _rate(
        everyone, num_sequences, verify_s, float(draft_s[num_eligible - 1]), early_stop
    )
    rate = max(plain, all_rate)
    reach = max(num_kept, min(num_sequences, len(verify_s) - 1), 1)
    row_s = float(verify_s[reach] - verify_s[0]) / reach
    half = num_eligible // 2
    block_s = float(draft_s[num_eligible - 1] - (draft_s[half - 1] if half else 0.0)) / (num_eligible - half)
    # Half of the samples choose and the others say what the choice is worth: luck is not counted twice.
    choosing, promising = (samples[::2], samples[1::2]) if len(samples) > 1 else (samples, samples)
    net = np.cumsum(choosing - rate * row_s, axis=2)  # [S, R, G] tokens beyond what their rows cost
    worth = np.maximum(net.max(axis=2), 0.0).mean(axis=0)  # [R]
    few = eligible & (worth > rate * block_s)
    best, chosen = plain * margin, none
    if all_rate > best:
        best, chosen = all_rate, eligible
    num_few = int(few.sum())
    if 0 < num_few < num_eligible:
        few_rate, _ = _rate(
            promising[:, few], num_sequences, verify_s, float(draft_s[num_few - 1]), early_stop
        )
        if few_rate > best:
            best, chosen = few_rate, few
    return chosen, best / plain if chosen is not none else 1.0


def _rate(
    samples: Float64, num_sequences: int, verify_s: Float64, draft_s: float, early_stop: bool
) -> tuple[float, int]:
    """Return the mean throughput when these blocks [S, n, G] are drafted, and the drafts kept of one step."""
    flat = samples.reshape(len(samples), -1)
    if flat.shape[1] > _MANY:  # many sequences: one step is as good as their mean
        flat = flat[:1]
    ordered = -np.sort(-flat.astype(np.float32), axis=1)
    tokens = np.empty((len(flat), flat.shape[1] + 1))
    tokens[:, 0] = num_sequences
    np.cumsum(ordered, axis=1, out=tokens[:, 1:])
    tokens[:, 1:] += num_sequences
    theta = tokens / (verify_s[: tokens.shape[1]] + draft_s)
    kept = early_stop_nums(theta) if early_stop else theta.argmax(axis=1)
    return float(np.take_along_axis(theta, kept[:, None], axis=1).mean()), int(kept.mean())
