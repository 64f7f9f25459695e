"""The calibration benchmark's own arithmetic: what it calls an error is one."""

from __future__ import annotations

import numpy as np
from dspark.calibration.online import OnlineCalibrator
from dspark_build.bench_calibration import WINDOW, Recorder, measure_windows

G, R = 3, 4


def feed(recorder: Recorder, *, steps: int, true_scale: float, seed: int) -> None:
    """Show labels drawn from sigmoid(logit * true_scale)."""
    rng = np.random.default_rng(seed)
    everyone = np.ones(R, np.bool_)
    for _ in range(steps):
        logits = rng.normal(0.0, 2.0, (R, G)).astype(np.float32)
        labels = (rng.random((R, G)) < 1.0 / (1.0 + np.exp(-true_scale * logits))).astype(np.float64)
        recorder.observe(logits, labels, sampled=~everyone, usable=everyone)


def test_a_right_forecast_shows_the_error_of_a_perfect_one_and_a_wrong_one_more() -> None:
    for scale, wrong in ((1.0, False), (3.0, True)):
        recorder = Recorder(OnlineCalibrator(block_size=G), learns=False)
        feed(recorder, steps=WINDOW, true_scale=scale, seed=1)
        (end,), (error,), (perfect,), (labels,) = measure_windows(recorder, every=WINDOW)
        assert end == WINDOW and labels == WINDOW * R * G
        assert (error > 5 * perfect) == wrong and (error < 2 * perfect) == (not wrong)


def test_a_recorder_that_learns_hands_its_labels_on_and_the_error_falls() -> None:
    recorder = Recorder(OnlineCalibrator(block_size=G), learns=True)
    feed(recorder, steps=2 * WINDOW, true_scale=3.0, seed=2)
    _, errors, perfect, _ = measure_windows(recorder, every=WINDOW // 5)
    assert recorder.inner.num_labels > 0
    assert errors[-1] < errors[0] and errors[-1] < 2.5 * perfect[-1]


def test_labels_that_are_unknown_or_of_rows_left_out_are_not_counted() -> None:
    recorder = Recorder(OnlineCalibrator(block_size=G), learns=False)
    labels = np.array([[1.0, 0.0, np.nan], [1.0, 1.0, 1.0]])
    recorder.observe(
        np.zeros((2, G), np.float32), labels, sampled=np.zeros(2, np.bool_), usable=np.array([True, False])
    )
    assert recorder.labels[0].tolist() == [1.0, 0.0] and recorder.forecasts[0].tolist() == [0.5, 0.5]
