"""Which drafts to verify: candidates in order of survival, and where to stop. Arrays in, arrays out.

A candidate is one drafted position of one sequence; its value is the survival a_{r,j}. Survival never rises
along a block, so taking candidates from the top keeps every prefix whole. Theta after i candidates is

    (R + a_(1) + ... + a_(i)) / (T_verify(B_0 + i) + T_draft)

Equal survival is ordered by position, then by sequence, so the same input always gives the same answer, and
the order never depends on anything behind the last candidate taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.scheduling.interface import Float64, Int32, Int64

__all__ = [
    "MAX_STALLS",
    "Candidates",
    "best_num",
    "early_stop_num",
    "early_stop_nums",
    "lookahead_num",
    "rank_candidates",
    "survival_of",
    "throughput",
    "verify_len_of",
]

MAX_STALLS = 32  # cliffs that one look-ahead crosses
_LOW_BITS = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Drafted positions in descending order of survival; those of survival 0 are left out."""

    survival: Float64  # [M]
    sequence: Int64  # [M] index r of the sequence


def survival_of(confidence: Float64, num_drafts: Int32) -> Float64:
    """Return a_k [R, G] = c_1 * ... * c_k, 0 from the first position that is not drafted or not a number.

    Arguments:
        confidence: [R, G] in [0, 1] or NaN.
        num_drafts: [R].
    """
    usable = np.arange(confidence.shape[1], dtype=np.int32) < num_drafts[:, None]
    return np.cumprod(np.where(usable & (confidence > 0.0), confidence, 0.0), axis=1)


def rank_candidates(survival: Float64) -> Candidates:
    """Order the candidates of survival [R, G].

    One sort of one integer per candidate: the bits of a positive float32 rise with its value, and below
    them stands the position-major index that breaks ties.
    """
    num_sequences = survival.shape[0]
    flat = np.ascontiguousarray(survival.T, np.float64).ravel()  # position-major: index = j * R + r
    alive = np.flatnonzero(flat > 0.0)
    bits = flat[alive].astype(np.float32).view(np.uint32)
    keys = ((~bits).astype(np.uint64) << np.uint64(32)) | alive.astype(np.uint64)
    keys.sort()
    index = (keys & _LOW_BITS).astype(np.int64)
    return Candidates(flat[index], index % num_sequences)


def throughput(candidates: Candidates, *, num_sequences: int, seconds: Float64) -> Float64:
    """Return Theta after 0, 1, ..., M candidates [M+1].

    Arguments:
        seconds: [>= M+1] seconds of the whole step with 0, 1, ... candidates.
    """
    num = len(candidates.survival)
    tokens = np.empty(num + 1)
    tokens[0] = num_sequences
    np.cumsum(candidates.survival, out=tokens[1:])
    tokens[1:] += num_sequences
    return tokens / seconds[: num + 1]


def early_stop_num(theta: Float64) -> int:
    """Return how many candidates are taken while Theta [M+1] rises: up to the first that fails to."""
    return int(early_stop_nums(theta[None])[0])


def early_stop_nums(theta: Float64) -> Int64:
    """Return `early_stop_num` of every row of Theta [S, M+1]."""
    rises = np.empty(theta.shape, np.bool_)
    np.greater(theta[:, 1:], theta[:, :-1], out=rises[:, :-1])
    rises[:, -1] = False
    return np.asarray(rises.argmin(axis=1))


def best_num(theta: Float64) -> int:
    """Return the number of candidates with the highest Theta, the smallest of equals.

    This looks at every candidate. It is lossless only where the survivals cannot depend on the tokens that
    are being chosen: those of an earlier step, or ones that were known before drafting.
    """
    return int(theta.argmax())


def lookahead_num(
    candidates: Candidates,
    theta: Float64,
    *,
    num_sequences: int,
    seconds: Float64,
    decay: float,
    max_ahead: int,
) -> int:
    """Early stop that sees over small cliffs.

    After i candidates the next one is taken when it, or it together with up to `max_ahead` more, would
    raise Theta. The ones behind it are not looked at: they are expected at the survival of the next one,
    falling by `decay` for every round through the batch. So a token's admission still never depends on that
    token.

    Arguments:
        theta: [M+1] from `throughput` with the same `seconds`.
        seconds: [N+1] seconds of the whole step with 0 .. N drafts, N = all drafts asked for; M, those of
            survival above 0, would give away what lies behind.
        decay: usual ratio of a_{k+1} to a_k, from earlier steps, in [0, 1].
        max_ahead: how many candidates to think ahead, >= 1.
    """
    num = len(candidates.survival)
    stop = early_stop_num(theta)
    if stop == num or max_ahead < 2:
        return stop
    ahead = np.arange(max_ahead)
    gain = np.cumsum(decay ** (ahead / max(num_sequences, 1)))  # [H] tokens per unit of survival
    for _ in range(MAX_STALLS):
        last = min(stop + max_ahead, len(seconds) - 1)
        reach = last - stop
        hoped = (theta[stop] * seconds[stop] + candidates.survival[stop] * gain[:reach]) / seconds[
            stop + 1 : last + 1
        ]
        if not (hoped > theta[stop]).any():
            return stop
        stop += 1
        stop += early_stop_num(theta[stop:])
        if stop == num:
            break
    return stop


def verify_len_of(candidates: Candidates, num: int, *, num_sequences: int) -> Int32:
    """Return verify_len [R] when the first `num` candidates are taken."""
    return np.bincount(candidates.sequence[:num], minlength=num_sequences).astype(np.int32)
