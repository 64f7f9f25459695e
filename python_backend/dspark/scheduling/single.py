"""The choices of `allocation` and `planning` for few drafts, without arrays.

One request at a time is the load at which speculation pays most and a step is shortest, and a dozen array calls over
seven numbers would cost more than a hundredth of it. Along a block survival never rises: the drafts of one sequence are
ranked already, and for some sequences together they come ranked.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.scheduling.allocation import MAX_STALLS

__all__ = ["drafting_gain", "early_stop_len", "lookahead_len", "rates_of"]


def drafting_gain(
    samples: Sequence[Sequence[float]],
    *,
    verify_s: Sequence[float],
    draft_s: float,
    early_stop: bool,
) -> float:
    """Return how many times the throughput without a draft is promised by drafting blocks like these.

    `planning.plan_drafting` asks the same of some sequences.

    Arguments:
        samples: survivals [S][G] of earlier blocks.
        verify_s: [>= G+1] seconds of the pass with 0, 1, ... drafts.
        draft_s: seconds of drafting the block.
        early_stop: drafts are going to be taken only up to the first that does not raise the throughput.
    """
    total = 0.0
    for survival in samples:
        rates = _rates(survival, verify_s, draft_s)
        total += rates[early_stop_len(rates)] if early_stop else max(rates)
    return total / len(samples) * verify_s[0]


def _rates(
    survival: Sequence[float], verify_s: Sequence[float], extra_s: float, *, num_sequences: int = 1
) -> list[float]:
    """Return tokens per second with 0, 1, ... drafts."""
    tokens = float(num_sequences)
    rates = [tokens / (verify_s[0] + extra_s)]
    for k, value in enumerate(survival, start=1):
        tokens += value
        rates.append(tokens / (verify_s[k] + extra_s))
    return rates


def rates_of(survival: Sequence[float], seconds: Sequence[float], *, num_sequences: int = 1) -> list[float]:
    """Return Theta [M+1] of the M drafts with survival above 0, best first, of R sequences."""
    alive = [value for value in survival if value > 0.0]
    return _rates(alive, seconds, 0.0, num_sequences=num_sequences)


def early_stop_len(rates: Sequence[float]) -> int:
    """Return how many drafts are taken while Theta rises."""
    for k in range(len(rates) - 1):
        if not rates[k + 1] > rates[k]:
            return k
    return len(rates) - 1


def lookahead_len(
    survival: Sequence[float],
    rates: Sequence[float],
    seconds: Sequence[float],
    *,
    decay: float,
    max_ahead: int,
) -> int:
    """Return what `allocation.lookahead_num` gives.

    Arguments:
        survival: [>= M], best first, the first M above 0.
        rates: [M+1] Theta.
        seconds: [N+1] of the step with 0 .. N drafts, N all drafts asked for.
        decay: usual ratio of one draft to the one before it: for R sequences the R-th root of that along a block.
    """
    num = len(rates) - 1
    stop = early_stop_len(rates)
    if max_ahead < 2:
        return stop
    for _ in range(MAX_STALLS):
        if stop == num:
            break
        tokens, hoped = rates[stop] * seconds[stop], survival[stop]
        for ahead in range(1, min(max_ahead, len(seconds) - 1 - stop) + 1):
            tokens += hoped
            hoped *= decay
            if tokens / seconds[stop + ahead] > rates[stop]:
                break
        else:
            return stop
        stop += 1
        stop += early_stop_len(rates[stop:])
    return stop
