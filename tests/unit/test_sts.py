"""Laws of sequential temperature scaling and of the calibration measures."""

from __future__ import annotations

import numpy as np
import pytest
from dspark.calibration.sts import (
    auc,
    brier,
    ece,
    ece_of_perfect,
    fit_scaled,
    fit_sts,
    forecast_survival,
    reliability,
    survival,
    survival_labels,
)
from dspark.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st


def overconfident(seed: int, num: int = 20000, size: int = 7, factor: float = 2.5):
    """Blocks whose true conditional logits are the reported ones divided by `factor`."""
    rng = np.random.default_rng(seed)
    true_logits = rng.normal(0.8, 1.2, (num, size))
    alive = rng.random((num, size)) < 1.0 / (1.0 + np.exp(-true_logits))
    accepted = np.cumprod(alive, axis=1).sum(axis=1)
    return true_logits * factor, accepted


def test_sts_lowers_the_error_of_overconfident_blocks_below_two_percent_at_every_position():
    logits, accepted = overconfident(0)
    half = len(logits) // 2
    labels, known = survival_labels(accepted, np.full(len(accepted), 7), 7)
    fit = fit_sts(logits[:half], labels[:half], known[:half])
    held_out = survival(logits[half:], fit.temperatures)
    raw = survival(logits[half:])
    for k in range(7):
        after = ece(held_out[:, k], labels[half:, k])
        assert after < 0.02
        assert after < ece(raw[:, k], labels[half:, k])


def test_sts_recovers_the_temperature_that_made_the_blocks_overconfident():
    logits, accepted = overconfident(1, num=60000)
    labels, known = survival_labels(accepted, np.full(len(accepted), 7), 7)
    fit = fit_sts(logits, labels, known)
    np.testing.assert_allclose(fit.temperatures[:3], 2.5, rtol=0.12)


def test_sts_keeps_the_order_inside_a_position():
    logits, accepted = overconfident(2, num=2000)
    labels, known = survival_labels(accepted, np.full(2000, 7), 7)
    fit = fit_sts(logits, labels, known)
    for k in range(7):
        np.testing.assert_array_equal(
            np.argsort(logits[:, k]), np.argsort(logits[:, k] / fit.temperatures[k])
        )


def test_a_calibrated_forecast_is_left_nearly_alone():
    logits, accepted = overconfident(3, factor=1.0)
    labels, known = survival_labels(accepted, np.full(len(accepted), 7), 7)
    fit = fit_sts(logits, labels, known)
    np.testing.assert_allclose(fit.temperatures[:3], 1.0, rtol=0.15)
    assert np.all(fit.ece_after <= fit.ece_before + 1e-12)


def test_positions_cut_off_at_random_do_not_move_the_fit():
    logits, accepted = overconfident(4, num=60000)
    verify = np.random.default_rng(5).integers(1, 8, len(accepted))
    cut = np.minimum(accepted, verify)
    labels, known = survival_labels(cut, verify, 7)
    fit = fit_sts(logits, labels, known)
    np.testing.assert_allclose(fit.temperatures[:2], 2.5, rtol=0.2)


def test_a_cut_off_position_is_unknown_and_one_behind_a_rejection_is_a_failure():
    labels, known = survival_labels([2, 1, 3], [2, 2, 3], 4)
    np.testing.assert_array_equal(known, [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
    np.testing.assert_array_equal(labels & known, [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])


def test_more_accepted_than_verified_is_refused():
    with pytest.raises(ConfigError, match="verify_len"):
        survival_labels([3], [2], 4)


def test_measures_agree_with_their_definitions_on_small_cases():
    assert ece([0.1, 0.1, 0.9, 0.9], [0, 0, 1, 1]) == pytest.approx(0.1)
    assert brier([0.5, 0.0], [1, 0]) == pytest.approx(0.125)
    assert auc([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1]) == 1.0
    assert auc([0.4, 0.3, 0.2, 0.1], [0, 0, 1, 1]) == 0.0
    assert auc([0.5, 0.5], [0, 1]) == 0.5
    assert np.isnan(auc([0.5, 0.5], [1, 1]))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=2, max_size=40))
def test_auc_is_the_share_of_ordered_pairs(pairs):
    score = np.array([p[0] for p in pairs], float)
    label = np.array([p[1] for p in pairs])
    good, bad = score[label], score[~label]
    if len(good) == 0 or len(bad) == 0:
        assert np.isnan(auc(score, label))
        return
    diff = good[:, None] - bad[None, :]
    assert auc(score, label) == pytest.approx(float(((diff > 0) + 0.5 * (diff == 0)).mean()))


def test_reliability_bins_weigh_to_the_ece():
    rng = np.random.default_rng(0)
    p, y = rng.random(500), rng.random(500) < 0.4
    bins = reliability(p, y)
    assert bins.weight.sum() == pytest.approx(1.0)
    assert float((bins.weight * np.abs(bins.forecast - bins.observed)).sum()) == pytest.approx(ece(p, y))


@pytest.mark.parametrize(
    ("logits", "labels", "grid", "word"),
    [
        (np.zeros((2, 3)), np.zeros((2, 2)), [1.0], "shape"),
        (np.full((2, 3), np.nan), np.zeros((2, 3)), [1.0], "finite"),
        (np.zeros((2, 3)), np.zeros((2, 3)), [0.0], "positive"),
    ],
)
def test_bad_input_to_the_fit_is_refused(logits, labels, grid, word):
    with pytest.raises(ConfigError, match=word):
        fit_sts(logits, labels, grid=grid)


def test_true_forecasts_show_the_error_that_is_told_of_them():
    rng = np.random.default_rng(2)
    for size in (300, 5000):
        p = rng.random(size)
        drawn = [ece(p, rng.random(size) < p) for _ in range(60)]
        assert ece_of_perfect(p) == pytest.approx(np.mean(drawn), rel=0.12)


def test_a_scaled_fit_finds_temperature_and_shift_of_cut_off_blocks():
    rng = np.random.default_rng(5)
    z = rng.normal(0.5, 1.5, (30_000, 3))
    temperatures, shifts = np.array([2.0, 1.0, 0.7]), np.array([-0.6, 0.0, 0.4])
    hits = rng.random(z.shape) < 1.0 / (1.0 + np.exp(-(z / temperatures + shifts)))
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    verify_len = rng.integers(1, 4, len(z))
    fit = fit_scaled(z, np.minimum(accepted, verify_len), verify_len)
    np.testing.assert_allclose(fit.temperatures, temperatures, rtol=0.1)
    np.testing.assert_allclose(fit.shifts, shifts, atol=0.08)
    forecast = forecast_survival(z, fit)
    assert ece(forecast[:, 2], accepted >= 3) < 0.01 < ece(survival(z)[:, 2], accepted >= 3)
    few = fit_scaled(z[:5], np.minimum(accepted, verify_len)[:5], verify_len[:5])
    assert np.all(few.temperatures > 0) and np.all(np.abs(few.shifts) < 0.5)
