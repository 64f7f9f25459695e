"""The online calibrator on traffic whose truth is known (algorithm.md, section 6, law 5)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from dspark.calibration.files import load_calibrator, save_calibrator
from dspark.calibration.online import OnlineCalibrator
from dspark.calibration.sts import ece
from dspark.errors import ConfigError
from dspark.scheduling.interface import COUPLED, GREEDY, REJECTION
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traffic import Kind, draw_blocks

G = 7
CODE = Kind(mean=2.5, fall=0.15, spread=1.2)
CHAT = Kind(mean=0.8, fall=0.1, spread=1.0, overconfidence=2.0, shift=1.0)


def serve(
    calibrator: OnlineCalibrator,
    kind: Kind,
    steps: int,
    *,
    seed: int,
    num_sequences: int = 8,
    exact: bool = False,
    deepest: int = G,
) -> None:
    """Serve steps: lengths follow the confidences, as a scheduler's would; cut-off positions stay unknown."""
    rng = np.random.default_rng(seed)
    at = np.arange(G)
    sampled = np.arange(num_sequences) % 2 == 0
    for _ in range(steps):
        blocks = draw_blocks(rng, kind, num_sequences, G)
        confidence = calibrator.confidence(blocks.logits, sampled=sampled)
        verify_len = (np.cumprod(confidence, axis=1) > 0.2).sum(axis=1).clip(1, deepest).astype(np.int32)
        accepted = blocks.accepted(verify_len)[:, None]
        labels = np.where(
            at < accepted, 1.0, np.where((at == accepted) & (at < verify_len[:, None]), 0.0, np.nan)
        )
        if exact:
            labels = np.where(sampled[:, None] & (at <= accepted), blocks.truth, labels)
        calibrator.observe(blocks.logits, labels, sampled=sampled, usable=np.ones(num_sequences, np.bool_))


def error(calibrator: OnlineCalibrator, kind: Kind, *, sampled: bool) -> float:
    """Return the ECE over held-out traffic, positions weighted by how often they are reached."""
    blocks = draw_blocks(np.random.default_rng(99), kind, 20_000, G)
    reached = np.cumprod(np.pad(blocks.hit, ((0, 0), (1, 0)), constant_values=True), axis=1)[:, :G] > 0
    confidence = calibrator.confidence(blocks.logits, sampled=np.full(20_000, sampled))
    return ece(confidence[reached], blocks.truth[reached])


@pytest.mark.parametrize("temperature", [1 / 3, 3.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_offline_fit_is_put_right(temperature: float, sampled: bool) -> None:
    calibrator = OnlineCalibrator(block_size=G, temperatures=[temperature] * G)
    before = error(calibrator, CODE, sampled=sampled)
    serve(calibrator, CODE, 1000, seed=1)
    assert before > 0.04
    assert error(calibrator, CODE, sampled=sampled) < 0.02


def test_coupled_and_rejection_traffic_are_calibrated_apart() -> None:
    """The same drafts, and so the same confidences, accepted less often under one rule than under the other."""
    calibrator = OnlineCalibrator(block_size=G)
    rng, at = np.random.default_rng(5), np.arange(G)
    kinds = np.array([REJECTION, COUPLED] * 4, np.int8)
    usable = np.ones(8, np.bool_)

    def truth_of(truth: npt.NDArray[np.float64], sampled: npt.NDArray[np.int8]) -> npt.NDArray[np.float64]:
        return np.where(sampled[:, None] == COUPLED, truth / (2.0 - truth), truth)  # (1 - TV) / (1 + TV)

    for _ in range(1000):
        blocks = draw_blocks(rng, CODE, 8, G)
        truth = truth_of(blocks.truth, kinds)
        accepted = np.logical_and.accumulate(rng.random((8, G)) < truth, axis=1).sum(axis=1)[:, None]
        labels = np.where(at < accepted, 1.0, np.where(at == accepted, 0.0, np.nan))
        calibrator.observe(blocks.logits, labels, sampled=kinds, usable=usable)
    again = OnlineCalibrator.restore(json.loads(json.dumps(calibrator.state())), block_size=G)
    held_out = draw_blocks(np.random.default_rng(98), CODE, 20_000, G)
    for kind in (REJECTION, COUPLED):
        sampled = np.full(20_000, kind, np.int8)
        for each in (calibrator, again):
            forecast = each.confidence(held_out.logits, sampled=sampled)
            assert ece(forecast.ravel(), truth_of(held_out.truth, sampled).ravel()) < 0.02


def test_one_block_in_plain_numbers_is_rated_as_in_arrays() -> None:
    calibrator = OnlineCalibrator(block_size=G, temperatures=[0.5 + 0.3 * k for k in range(G)])
    serve(calibrator, CODE, 200, seed=11)
    logits = np.array([[3.0, -2.0, 0.1, 90.0, -90.0, np.inf, 1.0]], np.float32)
    for kind in (GREEDY, REJECTION, COUPLED):
        expected = calibrator.confidence(logits, sampled=np.array([kind], np.int8))[0]
        assert calibrator.confidence_of_one(logits[0].tolist(), sampled=kind) == pytest.approx(expected[:5])
        assert np.isnan(expected[5])


def test_a_state_of_before_coupled_traffic_had_its_own_is_taken() -> None:
    calibrator = OnlineCalibrator(block_size=G)
    serve(calibrator, CODE, 100, seed=12)
    state = calibrator.state()
    del state["modes"]["coupled"]
    state["common"] = state["common"][:2]
    again = OnlineCalibrator.restore(state, block_size=G)
    assert np.allclose(again.parameters(sampled=GREEDY), calibrator.parameters(sampled=GREEDY))
    assert np.allclose(again.parameters(sampled=COUPLED), (1.0, 1.0, 0.0))


def test_a_change_of_traffic_is_noticed_and_followed() -> None:
    calibrator = OnlineCalibrator(block_size=G)
    serve(calibrator, CODE, 1000, seed=2)
    assert calibrator.num_drifts == 0
    assert error(calibrator, CHAT, sampled=False) > 0.1
    serve(calibrator, CHAT, 1000, seed=3)
    assert calibrator.num_drifts > 0
    assert error(calibrator, CHAT, sampled=False) < 0.03
    assert error(calibrator, CHAT, sampled=True) < 0.03
    assert np.nanmean(calibrator.ece()) < 0.06


def test_steady_traffic_is_never_taken_for_a_change() -> None:
    for seed in range(3):
        calibrator = OnlineCalibrator(block_size=G)
        serve(calibrator, CODE, 1500, seed=10 + seed)
        assert calibrator.num_drifts == 0


def test_the_forecasts_own_error_is_told() -> None:
    calibrator = OnlineCalibrator(block_size=G, temperatures=[3.0] * G)
    assert np.isnan(calibrator.ece()).all()
    serve(calibrator, CODE, 30, seed=4)
    early = np.nanmean(calibrator.ece())
    serve(calibrator, CODE, 1500, seed=5, exact=True)
    assert np.nanmean(calibrator.ece()) < 0.5 * early


def test_without_labels_the_offline_fit_stands() -> None:
    calibrator = OnlineCalibrator(block_size=3, temperatures=[2.0, 1.0, 0.5])
    logits = np.array([[1.0, -2.0, 0.5]], np.float32)
    expected = 1 / (1 + np.exp(-logits / [2.0, 1.0, 0.5]))
    for sampled in (False, True):
        np.testing.assert_allclose(
            calibrator.confidence(logits, sampled=np.array([sampled])), expected, rtol=1e-12
        )


def test_few_labels_move_it_little() -> None:
    calibrator = OnlineCalibrator(block_size=G)
    logits = np.full((8, G), 2.0, np.float32)
    usable, sampled = np.ones(8, np.bool_), np.zeros(8, np.bool_)
    labels = np.full((8, G), np.nan)
    labels[:, 0] = 0.0
    calibrator.observe(logits, labels, sampled=sampled, usable=usable)
    calibrator.flush()
    assert calibrator.confidence(logits, sampled=sampled)[0, 0] == pytest.approx(
        1 / (1 + np.exp(-2.0)), abs=0.05
    )


def test_cut_off_positions_are_unknown_not_failures() -> None:
    free, cut = (OnlineCalibrator(block_size=G) for _ in range(2))
    serve(free, CODE, 1500, seed=6)
    serve(cut, CODE, 1500, seed=6, deepest=2)
    blocks = draw_blocks(np.random.default_rng(7), CODE, 4000, G)
    greedy = np.zeros(4000, np.bool_)
    for calibrator in (free, cut):
        confidence = calibrator.confidence(blocks.logits, sampled=greedy)
        assert abs(float((confidence - blocks.truth)[:, 2:].mean())) < 0.02


def test_exact_labels_teach_faster_than_hits() -> None:
    exact, hits = (OnlineCalibrator(block_size=G, temperatures=[3.0] * G) for _ in range(2))
    serve(exact, CODE, 60, seed=8, exact=True)
    serve(hits, CODE, 60, seed=8)
    assert error(exact, CODE, sampled=True) < error(hits, CODE, sampled=True)


def test_greedy_and_sampled_traffic_are_learnt_apart() -> None:
    calibrator = OnlineCalibrator(block_size=G)
    rng = np.random.default_rng(9)
    greedy = np.zeros(8, np.bool_)
    for _ in range(400):
        blocks = draw_blocks(rng, CHAT, 8, G)
        calibrator.observe(blocks.logits, blocks.truth, sampled=greedy, usable=np.ones(8, np.bool_))
    assert error(calibrator, CHAT, sampled=False) < 0.02
    assert error(calibrator, CHAT, sampled=True) > 0.1


def test_altered_requests_and_logits_that_are_not_finite_teach_nothing() -> None:
    calibrator = OnlineCalibrator(block_size=2)
    logits = np.array([[np.nan, 1.0], [np.inf, 1.0], [0.5, 0.5]], np.float32)
    labels = np.zeros((3, 2))
    usable = np.array([True, False, False])
    for _ in range(40):
        calibrator.observe(logits, labels, sampled=np.zeros(3, np.bool_), usable=usable)
    assert calibrator.num_labels == 40  # position 2 of the first sequence
    assert calibrator.num_excluded == 200
    confidence = calibrator.confidence(logits, sampled=np.zeros(3, np.bool_))
    assert np.isnan(confidence[0, 0]) and np.isnan(confidence[1, 0])
    assert np.isfinite(confidence[:, 1]).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 20.0), flip=st.booleans())
def test_the_map_is_monotone_in_the_logit_whatever_is_learnt(seed: int, scale: float, flip: bool) -> None:
    rng = np.random.default_rng(seed)
    calibrator = OnlineCalibrator(block_size=3)
    for _ in range(6):
        logits = (scale * rng.normal(size=(40, 3))).astype(np.float32)
        labels: npt.NDArray[np.float64] = (logits < 0 if flip else rng.random(logits.shape) < 0.5).astype(
            np.float64
        )
        calibrator.observe(logits, labels, sampled=np.zeros(40, np.bool_), usable=np.ones(40, np.bool_))
    grid = np.repeat(np.linspace(-40, 40, 401, dtype=np.float32)[:, None], 3, axis=1)
    confidence = calibrator.confidence(grid, sampled=np.zeros(401, np.bool_))
    assert np.isfinite(confidence).all() and ((confidence >= 0) & (confidence <= 1)).all()
    assert (np.diff(confidence, axis=0) >= 0).all()


def test_positions_that_show_nothing_are_found() -> None:
    calibrator = OnlineCalibrator(block_size=4)
    labels = np.array([[1.0, 0.0, np.nan, np.nan]])
    one = np.ones(1, np.bool_)
    for _ in range(320):
        calibrator.observe(np.zeros((1, 4), np.float32), labels, sampled=one, usable=one)
    assert calibrator.deepest_starved() == 4
    calibrator.observe(np.zeros((1, 4), np.float32), np.ones((1, 4)), sampled=one, usable=one)
    calibrator.flush()
    assert calibrator.deepest_starved() == 0


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    calibrator = OnlineCalibrator(block_size=G, temperatures=[2.0] * G)
    serve(calibrator, CHAT, 300, seed=12)
    path = tmp_path / "learnt.json"
    save_calibrator(path, calibrator, drafter_hash="d1")
    again = load_calibrator(None, path, block_size=G, drafter_hash="d1", target_hash="t1")
    logits = np.random.default_rng(0).normal(size=(50, G)).astype(np.float32)
    for sampled in (False, True):
        np.testing.assert_allclose(
            again.confidence(logits, sampled=np.full(50, sampled)),
            calibrator.confidence(logits, sampled=np.full(50, sampled)),
            rtol=1e-12,
        )
    serve(again, CHAT, 100, seed=13)
    assert error(again, CHAT, sampled=False) < 0.03


def test_a_state_of_another_drafter_block_or_format_is_refused_naming_both() -> None:
    state = OnlineCalibrator(block_size=3).state(made_for="d1")
    with pytest.raises(ConfigError, match="made_for is 'd1' there and 'd2' here"):
        OnlineCalibrator.restore(state, block_size=3, made_for="d2")
    with pytest.raises(ConfigError, match="block_size is 3 there and 4 here"):
        OnlineCalibrator.restore(state, block_size=4, made_for="d1")
    with pytest.raises(ConfigError, match="format_version is 9 there and 2 here"):
        OnlineCalibrator.restore({**state, "format_version": 9}, block_size=3, made_for="d1")
    first = {
        name: value for name, value in state.items() if "shifts" not in name and name != "greedy_temperatures"
    }
    older = OnlineCalibrator.restore({**first, "format_version": 1}, block_size=3, made_for="d1")
    assert older.state(made_for="d1") == state
    broken = json.loads(json.dumps(state))
    broken["modes"]["greedy"]["parameters"][0][0] = -1.0
    with pytest.raises(ConfigError, match="slopes above 0"):
        OnlineCalibrator.restore(broken, block_size=3, made_for="d1")


def test_the_offline_fit_is_checked_against_the_pair_that_is_served(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    content = {
        "format_version": 1,
        "block_size": 2,
        "target_hash": "t1",
        "drafter_hash": "d1",
        "sts_temperatures": [1.5, 2.0],
    }
    path.write_text(json.dumps(content))
    fit = load_calibrator(path, block_size=2, drafter_hash="d1", target_hash="t1")
    assert fit.temperatures.tolist() == [1.5, 2.0]
    with pytest.raises(ConfigError, match="target_hash is 't1' in the file and 't2' here"):
        load_calibrator(path, block_size=2, drafter_hash="d1", target_hash="t2")
    path.write_text(json.dumps({**content, "sts_temperatures": [1.5, 0.0]}))
    with pytest.raises(ConfigError, match="sts_temperatures"):
        load_calibrator(path, block_size=2, drafter_hash="d1", target_hash="t1")
    assert load_calibrator(None, block_size=2, drafter_hash="d1", target_hash="t1").temperatures.tolist() == [
        1,
        1,
    ]


def test_greedy_requests_start_from_their_own_offline_fit(tmp_path: Path) -> None:
    content = {
        "format_version": 1,
        "block_size": 2,
        "target_hash": "t1",
        "drafter_hash": "d1",
        "sts_temperatures": [9.0, 9.0],
        "greedy_sts_temperatures": [1.0, 0.5],
        "sampled_sts_temperatures": [2.0, 4.0],
        "greedy_sts_shifts": [0.3, -0.2],
    }
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    fit = load_calibrator(path, block_size=2, drafter_hash="d1", target_hash="t1")
    logits, kinds = np.full((3, 2), 1.0, np.float32), np.arange(3)  # greedy, sampled, coupled
    x = 1.0 / np.array([[1.0, 0.5], [2.0, 4.0], [2.0, 4.0]]) + np.array([[0.3, -0.2], [0, 0], [0, 0]])
    wanted = 1 / (1 + np.exp(-x))
    again = OnlineCalibrator.restore(fit.state(), block_size=2)
    for calibrator in (fit, again):
        np.testing.assert_allclose(calibrator.confidence(logits, sampled=kinds), wanted, rtol=1e-12)
        for row in range(3):
            one = calibrator.confidence_of_one([1.0, 1.0], sampled=row)
            np.testing.assert_allclose(one, wanted[row], rtol=1e-12)
    for field in ("greedy_sts_temperatures", "greedy_sts_shifts"):
        path.write_text(json.dumps({**content, field: [1.0]}))
        with pytest.raises(ConfigError, match=field.replace("sts_", "")):
            load_calibrator(path, block_size=2, drafter_hash="d1", target_hash="t1")


def test_kinds_differ_enough_to_matter() -> None:
    raw = OnlineCalibrator(block_size=G)
    assert error(raw, CODE, sampled=False) < 0.01 < 0.1 < error(raw, CHAT, sampled=False)
    assert error(raw, replace(CHAT, overconfidence=1.0, shift=0.0), sampled=False) < 0.01
