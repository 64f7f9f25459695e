"""Noise that belongs to a token: the Gumbel race of one (seed, position).

Token t at position p owns one uniform number of 40 bits, whatever else could have been drawn there:

    u = (byte + (word + 0.5) / 2**32) / 256,    g = -log(-log(u)),    drawn token = argmax(log p_t + g_t)

    byte   byte t % 16 (little end first) of Philox counter (t // 16, position, TOKEN_COARSE, 0)
    word   word t % 4 of Philox counter (t // 4, position, TOKEN_FINE, 0)

Drafter and target that race with the same noise agree as often as their distributions allow, and what the
target draws does not depend on whether, or by whom, it was drafted. The split into byte and word is for speed
alone: the byte bounds g from both sides, so only a few hundred tokens of a whole vocabulary need their word.
The result is exact.

Source of the coupling: Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding" (arXiv 2408.07978).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dspark.sampling.philox import Purpose, philox4x32

__all__ = ["gumbel_argmax", "token_gumbel"]

Float64 = npt.NDArray[np.float64]

_CHUNK = 3072  # Philox counters at a time: the working set stays in the second-level cache
_FINEST = 2.0**-41  # distance of the extreme uniforms from 0 and 1


def _gumbel(u: Float64) -> Float64:
    return np.asarray(-np.log(-np.log(u)))


# Bounds of g given the byte, [256]; a hair wider than exact so that rounding can never cut off the winner.
_BYTE = np.arange(256) / 256.0
_LOWER = _gumbel(np.maximum(_BYTE, _FINEST)) - 1e-9
_UPPER = _gumbel(np.minimum(_BYTE + 1 / 256.0, 1.0 - _FINEST)) + 1e-9
_UPPER_BELOW_TOP = float(_UPPER[254])  # no token whose byte is not 255 has more noise than this, 5.54
_UPPER_ANY = float(_UPPER[255])  # 28.4
_SPARSE = 64  # a token in so many, or fewer: cheaper one by one than all bytes
_NEAR = 3.0  # tokens this close to the likeliest one are tried for the first bound


def token_gumbel(token_ids: npt.NDArray[np.integer[Any]], *, seed: int, position: int) -> Float64:
    """Return the Gumbel noise of single tokens.

    Arguments:
        token_ids: [n] any order.
        seed: 64-bit request seed.
        position: absolute position of the token to be drawn.

    Returns:
        float64 [n].
    """
    ids = token_ids.astype(np.uint64)
    n = len(ids)
    counters = np.concatenate((ids >> np.uint64(4), ids >> np.uint64(2)))
    purposes = np.repeat((int(Purpose.TOKEN_COARSE), int(Purpose.TOKEN_FINE)), n)
    words = philox4x32(seed, counters, position, purposes)
    lane = (ids & np.uint64(15)).astype(np.intp)
    coarse = (words[lane >> 2, np.arange(n)] >> ((lane & 3) * 8).astype(np.uint32)) & np.uint32(255)
    return _joined(coarse, words[lane & 3, np.arange(n, 2 * n)])


def gumbel_argmax(
    log_weights: npt.NDArray[np.floating[Any]],
    token_ids: npt.NDArray[np.int32] | None,
    *,
    seed: int,
    position: int,
) -> int:
    """Draw one token: the arg-max of log weight + the token's own noise, the first entry among equals.

    Arguments:
        log_weights: [n] logarithms of weights up to a common constant, at least one finite; -inf = never
            drawn.
        token_ids: [n] tokens the weights belong to, any order; None = entry i is token i.
        seed: 64-bit request seed.
        position: absolute position of the token to be drawn.

    Returns:
        The token id.
    """
    if token_ids is None:
        return _race(log_weights, _all_bytes(len(log_weights), seed, position), None, seed, position)
    if len(token_ids) == 1:
        return int(token_ids[0])
    end = int(token_ids.max()) + 1
    if _SPARSE * len(token_ids) < end:
        noise = token_gumbel(token_ids, seed=seed, position=position)
        return int(token_ids[int((log_weights + noise).argmax())])
    coarse = _all_bytes(end, seed, position)[token_ids]
    return int(token_ids[_race(log_weights, coarse, token_ids, seed, position)])


def _race(
    log_weights: npt.NDArray[np.floating[Any]],
    coarse: npt.NDArray[np.uint8],
    token_ids: npt.NDArray[np.int32] | None,
    seed: int,
    position: int,
) -> int:
    """Return the winning entry, from the leading bytes [n] of all and the words of those that may win."""
    top = float(log_weights.max())
    near = np.flatnonzero(log_weights >= top - _NEAR)
    # Some token reaches at least `bound`, so whatever cannot reach it is out of the race.
    bound = float((log_weights[near] + _LOWER[coarse[near]]).max())
    bound -= 1e-6 * (abs(top) + 64.0)  # comparisons below may round to float32
    likely = np.flatnonzero(log_weights >= bound - _UPPER_BELOW_TOP)
    likely = likely[log_weights[likely] + _UPPER[coarse[likely]] >= bound]
    lucky = np.flatnonzero(coarse == 255)
    lucky = lucky[log_weights[lucky] >= bound - _UPPER_ANY]
    racing = np.union1d(likely, lucky)
    ids = (racing if token_ids is None else token_ids[racing]).astype(np.uint64)
    words = philox4x32(seed, ids >> np.uint64(2), position, Purpose.TOKEN_FINE)
    word = words[(ids & np.uint64(3)).astype(np.intp), np.arange(len(ids))]
    return int(racing[int((log_weights[racing] + _joined(coarse[racing], word)).argmax())])


def _all_bytes(n: int, seed: int, position: int) -> npt.NDArray[np.uint8]:
    """Return the leading bytes of tokens 0..n-1."""
    num_counters = -(-n // 16)
    words = np.empty((num_counters, 4), "<u4")
    for start in range(0, num_counters, _CHUNK):
        counters = np.arange(start, min(start + _CHUNK, num_counters), dtype=np.uint64)
        words[start : start + _CHUNK] = philox4x32(seed, counters, position, Purpose.TOKEN_COARSE).T
    return words.view(np.uint8).reshape(-1)[:n]


def _joined(coarse: npt.NDArray[np.unsignedinteger[Any]], word: npt.NDArray[np.uint32]) -> Float64:
    """Return the noise whose leading byte and following word are these."""
    return _gumbel((coarse + (word + 0.5) * 2.0**-32) * 2.0**-8)
