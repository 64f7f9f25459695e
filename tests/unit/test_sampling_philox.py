"""Laws of the counter-based generator."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.sampling.philox import (
    Purpose,
    philox4x32,
    philox4x32_words,
    rand,
    randint4x,
    uniform,
    uniform_scalar,
)
from support.chi_square import assert_distributed_as

# Random123's known-answer vectors for philox4x32-10: counter, key (low, high), words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_words_equal_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    seed = key[0] | key[1] << 32
    assert philox4x32_words(seed, *counter) == words
    few = philox4x32(seed, [counter[0]], *counter[1:])
    many = philox4x32(seed, [counter[0]] * 100, *counter[1:])
    np.testing.assert_array_equal(few[:, 0], words)
    np.testing.assert_array_equal(many, np.tile(np.array(words)[:, None], 100))


@pytest.mark.parametrize("n", [1, 8, 9, 3000])
def test_arrays_equal_scalars_lane_by_lane(n: int) -> None:
    counters, purposes = np.arange(n) * 7919 % 2**32, np.arange(n) % 6
    words = philox4x32(0x9E3779B97F4A7C15, counters, 12, purposes)
    assert words.shape == (4, n)
    assert words.dtype == np.uint32
    for i in range(0, n, max(n // 20, 1)):
        assert tuple(words[:, i]) == philox4x32_words(
            0x9E3779B97F4A7C15, int(counters[i]), 12, int(purposes[i])
        )
    numbers = uniform(5, 12, Purpose.ACCEPT, n)
    assert numbers[-1] == uniform_scalar(5, 12, Purpose.ACCEPT, n - 1)


def test_triton_language_numbers_follow_from_the_words() -> None:
    offsets = np.arange(50)
    words = randint4x(2**40 + 3, offsets)
    np.testing.assert_array_equal(words, philox4x32(2**40 + 3, offsets))
    for number, word in zip(rand(2**40 + 3, offsets), words[0], strict=True):
        signed = int(word) - 2**32 if word >= 2**31 else int(word)
        folded = -signed - 1 if signed < 0 else signed
        assert number == np.float32(folded) * np.float32(4.6566127342e-10)
        assert 0.0 <= number < 1.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_uniform_numbers_fill_the_open_interval_evenly(dtype: type[np.floating]) -> None:
    numbers = uniform(11, 3, Purpose.SAMPLE, 40_000, dtype=dtype)
    assert numbers.dtype == dtype
    assert numbers.min() > 0.0 and numbers.max() < 1.0
    assert_distributed_as(np.bincount((numbers * 64).astype(int), minlength=64), np.ones(64))


def test_seed_position_purpose_and_lane_all_matter() -> None:
    places = {
        uniform_scalar(seed, position, purpose, lane)
        for seed in (0, 1, 2**32, 2**63)
        for position in (0, 1, 70_000)
        for purpose in Purpose
        for lane in (0, 1)
    }
    assert len(places) == 4 * 3 * len(Purpose) * 2


def test_purposes_go_by_their_names() -> None:
    assert [Purpose.of(purpose.name.lower()) for purpose in Purpose] == list(Purpose)
    assert Purpose.of(Purpose.REPLACE) is Purpose.REPLACE
