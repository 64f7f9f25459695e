"""The choices of `allocation` and `planning` for few drafts, without arrays.

One request at a time is the load at which speculation pays most and a step is shortest, and a dozen array calls over
seven numbers would cost more than a hundredth of it. Along a block survival never rises: the drafts of one sequence are
ranked already, and for some sequences together they come ranked.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.scheduling.allocation import MAX_STALLS

__all__ = ["drafting_gain", "early_stop_len", "lookahead_len", "lookahead_lens", "plan_few", "rates_of"]


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


def plan_few(
    blocks: Sequence[Sequence[Sequence[float]]],
    eligible: Sequence[bool],
    *,
    verify_s: Sequence[float],
    draft_s: Sequence[float],
    early_stop: bool,
    margin: float,
) -> tuple[list[bool], float]:
    """Return what `planning.plan_drafting` gives: who is worth drafting [R], and the throughput that promises.

    Arguments:
        blocks: [R][S] survivals of earlier blocks, of up to G; S >= 1.
        eligible: [R].
        verify_s: [>= R*G + 1] seconds of the target pass with 0, 1, ... drafts, never falling.
        draft_s: [>= number eligible] seconds of drafting 1, 2, ... blocks.
        early_stop, margin: as there.
    """
    num_sequences, num_eligible = len(blocks), sum(eligible)
    chosen = [False] * num_sequences
    if not num_eligible:
        return chosen, 1.0
    plain = num_sequences / verify_s[0]
    everyone = [of_one for of_one, asked in zip(blocks, eligible, strict=True) if asked]
    all_rate, kept = _mean_rate(everyone, num_sequences, verify_s, draft_s[num_eligible - 1], early_stop)
    rate = max(plain, all_rate)
    reach = max(kept, min(num_sequences, len(verify_s) - 1), 1)
    row_tokens = rate * (verify_s[reach] - verify_s[0]) / reach
    half = num_eligible // 2
    block_s = (draft_s[num_eligible - 1] - (draft_s[half - 1] if half else 0.0)) / (num_eligible - half)
    few = [
        asked and _mean_worth(of_one[:: 2 if len(of_one) > 1 else 1], row_tokens) > rate * block_s
        for of_one, asked in zip(blocks, eligible, strict=True)
    ]
    best = plain * margin
    if all_rate > best:
        best, chosen = all_rate, list(eligible)
    num_few = sum(few)
    if 0 < num_few < num_eligible:
        # Half of the samples choose and the others say what the choice is worth: luck is not counted twice.
        promising = [of[1 if len(of) > 1 else 0 :: 2] for of, asked in zip(blocks, few, strict=True) if asked]
        few_rate, _ = _mean_rate(promising, num_sequences, verify_s, draft_s[num_few - 1], early_stop)
        if few_rate > best:
            best, chosen = few_rate, few
    return chosen, best / plain if any(chosen) else 1.0


def _mean_rate(
    blocks: Sequence[Sequence[Sequence[float]]],
    num_sequences: int,
    verify_s: Sequence[float],
    draft_s: float,
    early_stop: bool,
) -> tuple[float, int]:
    """Return the mean throughput when these blocks [n][S] are drafted, and the drafts kept of one step."""
    total, kept = 0.0, 0
    step_s = [seconds + draft_s for seconds in verify_s]
    for of_step in zip(*blocks, strict=True):
        tokens, best, at = float(num_sequences), num_sequences / step_s[0], 0
        flat = [value for survival in of_step for value in survival]
        flat.sort(reverse=True)
        for taken, value in enumerate(flat, start=1):
            tokens += value
            rate = tokens / step_s[taken]
            if rate > best:
                best, at = rate, taken
            elif early_stop:
                break
        total += best
        kept += at
    num_steps = len(blocks[0])
    return total / num_steps, kept // num_steps


def _mean_worth(samples: Sequence[Sequence[float]], row_tokens: float) -> float:
    """Return the most that a block [S] is worth in tokens, beyond what its rows cost."""
    total = 0.0
    for survival in samples:
        net = best = 0.0
        for value in survival:
            net += value - row_tokens
            if net > best:
                best = net
        total += best
    return total / len(samples)


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
    seconds: Sequence[float],
    *,
    num_sequences: int = 1,
    decay: float,
    max_ahead: int,
    num_sizes: int | None = None,
) -> int:
    """Return what `allocation.lookahead_num` gives, in one walk: few lines behind a pass that emptied the caches.

    Arguments:
        survival: [>= M], best first, the first M above 0.
        seconds: [N+1] of the step with 0 .. N drafts, N all drafts asked for.
        num_sequences: R.
        decay: usual ratio of one draft to the one before it: for R sequences the R-th root of that along a block.
        num_sizes: entries of `seconds` that count; None = all.
    """
    end = len(seconds) if num_sizes is None else num_sizes
    tokens = float(num_sequences)
    rate = tokens / seconds[0]
    num_stalls = 0
    for taken, value in enumerate(survival):
        if not value > 0.0:
            return taken
        next_rate = (tokens + value) / seconds[taken + 1]
        if not next_rate > rate:
            num_stalls += 1
            if num_stalls > MAX_STALLS:
                return taken
            hoped_tokens, hoped = tokens + value, value
            for size in range(taken + 2, min(taken + max_ahead + 1, end)):
                hoped *= decay
                hoped_tokens += hoped
                if hoped_tokens / seconds[size] > rate:
                    break
            else:
                return taken
        tokens += value
        rate = next_rate
    return len(survival)


def lookahead_lens(
    survival: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    decay: float,
    max_ahead: int,
    num_sizes: int,
) -> list[int]:
    """Return how many drafts of each sequence `lookahead_len` takes of those of some sequences together.

    The best draft that is left is looked for among the first ones, so nothing is ranked: blocks fall.

    Arguments:
        survival: [R] of each up to G, falling.
        seconds, decay, max_ahead, num_sizes: as there.
    """
    num_sequences = len(survival)
    lens = [0] * num_sequences
    heads = [of_one[0] if of_one else 0.0 for of_one in survival]
    tokens, taken, num_stalls = float(num_sequences), 0, 0
    rate = tokens / seconds[0]
    while True:
        value, best = 0.0, -1
        for sequence, head in enumerate(heads):  # of equals the one that comes earlier in its block
            if head > value or (head == value and best >= 0 and lens[sequence] < lens[best]):
                value, best = head, sequence
        if best < 0:
            return lens
        next_rate = (tokens + value) / seconds[taken + 1]
        if not next_rate > rate:
            num_stalls += 1
            if num_stalls > MAX_STALLS:
                return lens
            hoped_tokens, hoped = tokens + value, value
            for size in range(taken + 2, min(taken + max_ahead + 1, num_sizes)):
                hoped *= decay
                hoped_tokens += hoped
                if hoped_tokens / seconds[size] > rate:
                    break
            else:
                return lens
        tokens += value
        rate = next_rate
        taken += 1
        of_one, length = survival[best], lens[best] + 1
        lens[best] = length
        heads[best] = of_one[length] if length < len(of_one) else 0.0
