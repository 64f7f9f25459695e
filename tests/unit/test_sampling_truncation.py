"""Laws of top-k, top-p and min-p, against code that sorts everything."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.sampling.truncation import truncate
from hypothesis import given, settings
from hypothesis import strategies as st


def naive_truncate(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    order = np.lexsort((np.arange(len(scaled)), -scaled))  # likelier first, then lower id
    if top_k:
        order = order[:top_k]
    if top_p < 1.0:
        weights = np.exp(scaled[order]).astype(np.float64)
        order = order[: int(np.argmax(weights.cumsum() >= top_p * weights.sum() - 1e-12)) + 1]
    if min_p > 0.0:
        order = order[scaled[order] >= np.float32(np.log(min_p))]
    return np.sort(order)


def kept(scaled: np.ndarray, **how: float) -> np.ndarray:
    entries = truncate(scaled, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **how})
    return np.arange(len(scaled)) if entries is None else entries


def row(seed: int, n: int, spread: float) -> np.ndarray:
    values = (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)
    return values - values.max()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 7, 300, 5000]),
    st.sampled_from([0.3, 2.0, 8.0]),
    st.sampled_from([0, 1, 2, 50, 400]),
    st.sampled_from([1.0, 0.999, 0.9, 0.31, 1e-6]),
    st.sampled_from([0.0, 0.01, 0.7]),
)
def test_kept_tokens_equal_those_of_a_full_sort(
    seed: int, n: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    scaled = row(seed, n, spread)
    expected = naive_truncate(scaled, top_k, top_p, min_p)
    np.testing.assert_array_equal(kept(scaled, top_k=top_k, top_p=top_p, min_p=min_p), expected)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0, 1, 3, 40]), st.sampled_from([1.0, 0.5, 0.02]))
def test_equals_are_kept_from_the_lowest_id_up(seed: int, top_k: int, top_p: float) -> None:
    # Weights are powers of two, so that every sum is exact and most tokens have equals.
    levels = np.random.default_rng(seed).integers(0, 3, size=256)
    levels[levels == levels.min()] = 0
    scaled = (-levels * np.log(2.0)).astype(np.float32)
    np.testing.assert_array_equal(
        kept(scaled, top_k=top_k, top_p=top_p), naive_truncate(scaled, top_k, top_p, 0.0)
    )


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.999999}])
def test_the_likeliest_token_always_stays(how: dict[str, float]) -> None:
    scaled = row(5, 1000, 1.0)
    np.testing.assert_array_equal(kept(scaled, **how), [scaled.argmax()])
    np.testing.assert_array_equal(kept(np.zeros(1000, np.float32), **how)[0], 0)


def test_impossible_tokens_are_never_kept_by_top_p() -> None:
    scaled = np.full(500, -np.inf, np.float32)
    scaled[[3, 70]] = 0.0
    np.testing.assert_array_equal(kept(scaled, top_p=0.9999), [3, 70])


def test_nothing_is_cut_when_everything_is_off() -> None:
    assert truncate(row(1, 100, 1.0), top_k=0, top_p=1.0, min_p=0.0) is None
    assert truncate(row(1, 100, 1.0), top_k=100, top_p=1.0, min_p=0.0) is None
