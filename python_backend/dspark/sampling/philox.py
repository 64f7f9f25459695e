"""Philox4x32-10: random numbers that are a pure function of where they are used.

Counter layout, the same on the host and in kernels: (lane, position, purpose, 0), keyed by the 64-bit request
seed. A number therefore depends on nothing that runs beside the request. The words equal Random123's and
those of `tl.philox` in the Triton language; `randint4x` and `rand` equal their namesakes there. Knows nothing
of tokens.

Source of the generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Purpose", "philox4x32", "philox4x32_words", "rand", "randint4x", "uniform", "uniform_scalar"]

UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_FEW = 8  # counters up to which plain integers are faster than arrays
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_MULTIPLIER_COLUMN = np.array([[_MULTIPLIERS[0]], [_MULTIPLIERS[1]]], np.uint64)  # [2, 1]
_MASK64 = np.uint64(_MASK)
_SHIFT64 = np.uint64(32)


class Purpose(IntEnum):
    """What a random number decides; part of its counter, so that no two decisions share one."""

    DRAFT = 0  # drawing a drafted token
    ACCEPT = 1  # accepting or rejecting a drafted token
    REPLACE = 2  # drawing the token that replaces a rejected one
    SAMPLE = 3  # drawing a token from the target alone
    TOKEN_COARSE = 4  # leading byte of a token's own noise (gumbel.py)
    TOKEN_FINE = 5  # the 32 bits behind it

    @classmethod
    def of(cls, purpose: Purpose | str) -> Purpose:
        """Return the member that a lower-case name or a member stands for."""
        return cls[purpose.upper()] if isinstance(purpose, str) else purpose


def philox4x32(
    seed: int, c0: npt.ArrayLike, c1: npt.ArrayLike = 0, c2: npt.ArrayLike = 0, c3: npt.ArrayLike = 0
) -> UInt32:
    """Return the four words of many counters.

    Arguments:
        seed: 64-bit key; its low half is the first key word.
        c0: [n] first counter words, values below 2**32.
        c1, c2, c3: the other counter words, [n] or one for all.

    Returns:
        uint32 [4, n].
    """
    first = np.asarray(c0, np.uint64)
    n = len(first)
    if n <= _FEW:
        counters = np.stack(np.broadcast_arrays(first, c1, c2, c3), axis=1).tolist()
        few = [philox4x32_words(seed, *map(int, counter)) for counter in counters]
        return np.array(few, np.uint32).reshape(n, 4).T
    evens = np.empty((2, n), np.uint64)  # c0, c2: what is multiplied
    odds = np.empty((2, n), np.uint64)  # c1, c3; the high half is ignored
    evens[0], evens[1] = first, c2
    odds[0], odds[1] = c1, c3
    product = np.empty((2, n), np.uint64)
    keys = _round_keys(seed)
    for i in range(_ROUNDS):
        np.multiply(evens, _MULTIPLIER_COLUMN, out=product)
        # The product of c0 feeds (c2, c3) and that of c2 feeds (c0, c1): the rows cross.
        np.right_shift(product[::-1], _SHIFT64, out=evens)
        evens ^= odds
        evens ^= keys[i]
        evens &= _MASK64
        odds[...] = product[::-1]
    words = np.empty((4, n), np.uint32)
    words[0], words[2] = evens
    words[1], words[3] = odds & _MASK64
    return words


def _round_keys(seed: int) -> UInt64:
    """Return the key words of every round, [rounds, 2, 1] uint64."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    return np.array(
        [[[(k0 + i * _WEYL[0]) & _MASK], [(k1 + i * _WEYL[1]) & _MASK]] for i in range(_ROUNDS)], np.uint64
    )


def philox4x32_words(seed: int, c0: int, c1: int = 0, c2: int = 0, c3: int = 0) -> tuple[int, int, int, int]:
    """Return the four words of one counter; the scalar twin of `philox4x32`, some microseconds."""
    m0, m1 = _MULTIPLIERS
    w0, w1 = _WEYL
    mask = _MASK
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(_ROUNDS):
        a = m0 * c0
        b = m1 * c2
        c0 = (b >> 32) ^ c1 ^ k0
        c1 = b & mask
        c2 = (a >> 32) ^ c3 ^ k1
        c3 = a & mask
        k0 = (k0 + w0) & mask
        k1 = (k1 + w1) & mask
    return c0, c1, c2, c3


def uniform_scalar(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
    """Return one number in the open interval (0, 1), a multiple of 2**-53 (plus half of one)."""
    high, low, _, _ = philox4x32_words(seed, lane, position, purpose)
    return (((high << 20) | (low >> 12)) + 0.5) * 2.0**-52


def uniform(
    seed: int, position: int, purpose: Purpose, n: int = 1, *, dtype: type[np.floating[Any]] = np.float64
) -> npt.NDArray[np.floating[Any]]:
    """Return the numbers of lanes 0..n-1 in the open interval (0, 1).

    Arguments:
        seed: 64-bit request seed.
        position: absolute token position.
        purpose: what the numbers decide.
        n: lanes.
        dtype: float64 (52 random bits; equal to `uniform_scalar` lane by lane) or float32 (23 random bits).
    """
    words = philox4x32(seed, np.arange(n, dtype=np.uint64), position, purpose)
    if dtype is np.float32:
        narrow = (words[0] >> np.uint32(9)).astype(np.float32)
        return np.asarray((narrow + np.float32(0.5)) * np.float32(2.0**-23))
    bits = (words[0].astype(np.uint64) << np.uint64(20)) | (words[1].astype(np.uint64) >> np.uint64(12))
    return np.asarray((bits.astype(np.float64) + 0.5) * 2.0**-52)


def randint4x(seed: int, offset: npt.ArrayLike) -> UInt32:
    """Return `tl.randint4x(seed, offset)` of the Triton language, uint32 [4, n]; offsets are 32-bit."""
    return philox4x32(seed, np.atleast_1d(np.asarray(offset, np.uint64)))


def rand(seed: int, offset: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return what the Triton language's `tl.rand(seed, offset)` returns, float32 [n] in [0, 1)."""
    signed = randint4x(seed, offset)[0].view(np.int32)
    folded = np.where(signed < 0, -1 - signed, signed)
    return folded.astype(np.float32) * np.float32(4.6566127342e-10)
