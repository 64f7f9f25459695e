"""Laws of the token noise and its race."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.sampling.gumbel import gumbel_argmax, token_gumbel
from dspark.sampling.philox import Purpose, philox4x32_words
from support.chi_square import assert_distributed_as


def test_noise_follows_from_its_published_counters() -> None:
    for token in (0, 3, 17, 255, 151_935):
        byte = (
            philox4x32_words(77, token // 16, 5, Purpose.TOKEN_COARSE)[token % 16 // 4] >> 8 * (token % 4)
            & 255
        )
        word = philox4x32_words(77, token // 4, 5, Purpose.TOKEN_FINE)[token % 4]
        u = (byte + (word + 0.5) / 2**32) / 256
        assert token_gumbel(np.array([token]), seed=77, position=5)[0] == pytest.approx(
            -np.log(-np.log(u)), rel=1e-12
        )


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    everything = token_gumbel(np.arange(5000), seed=3, position=8)
    few = np.array([4999, 0, 17, 16, 2048])
    np.testing.assert_array_equal(token_gumbel(few, seed=3, position=8), everything[few])


def test_noise_is_gumbel_distributed() -> None:
    noise = token_gumbel(np.arange(60_000), seed=1, position=0)
    cdf = np.exp(-np.exp(-noise))
    assert_distributed_as(np.bincount((cdf * 100).astype(int), minlength=100), np.ones(100))


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("vocab_size", [2, 50, 3001, 49_152])
def test_pruned_race_equals_the_full_race(vocab_size: int, spread: float) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = (rng.normal(size=vocab_size) * spread).astype(np.float32)
    logits[rng.random(vocab_size) < 0.1] = -np.inf
    logits[0] = 0.0
    for seed in range(6):
        reached = logits + token_gumbel(np.arange(vocab_size), seed=seed, position=seed)
        assert gumbel_argmax(logits, None, seed=seed, position=seed) == reached.argmax()


@pytest.mark.parametrize("n", [1, 2, 30, 2000])
def test_race_over_a_support_equals_the_race_with_the_others_at_zero(n: int) -> None:
    rng = np.random.default_rng(n)
    for seed in range(10):
        ids = np.sort(rng.choice(20_000, n, replace=False)).astype(np.int32)
        log_weights = rng.normal(size=n) * 2
        full = np.full(20_000, -np.inf)
        full[ids] = log_weights
        drawn = gumbel_argmax(log_weights, ids, seed=seed, position=4)
        assert drawn == gumbel_argmax(full, None, seed=seed, position=4)
        turned = rng.permutation(n)
        assert drawn == gumbel_argmax(log_weights[turned], ids[turned], seed=seed, position=4)


def test_race_draws_every_token_as_often_as_its_weight_says() -> None:
    probs = np.array([0.5, 0.25, 0.2, 0.04, 0.01, 0.0])
    with np.errstate(divide="ignore"):
        log_weights = np.log(probs) + 7.0
    counts = np.zeros(6)
    for position in range(6000):
        counts[gumbel_argmax(log_weights, None, seed=9, position=position)] += 1
    assert_distributed_as(counts, probs)
