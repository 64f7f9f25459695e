"""Cost curves: what is refused, what a curve says, and how served steps correct it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from dspark.errors import ConfigError
from dspark.scheduling.corrected_curve import CorrectedCurve
from dspark.scheduling.cost_model import CapacityFile, CostCurve, CostModel, Fingerprint
from dspark.scheduling.interface import StepObservation

CURVE = CostCurve(
    target_tokens=(1, 8, 64, 65, 256),
    verify_s=(0.010, 0.014, 0.030, 0.040, 0.100),
    num_blocks=(1, 64),
    draft_s=(0.003, 0.020),
)
HERE = Fingerprint(
    machine="cpu a", executor="native", dtype="int8", num_threads=2, target_hash="t1", drafter="d1"
)


def step(
    *, target_tokens: int, verify_s: float, num_blocks: int = 0, draft_s: float = 0.0, context_tokens: int = 0
) -> StepObservation:
    one = np.zeros(1, np.int32)
    return StepObservation(
        sequence_ids=np.zeros(1, np.int64),
        num_drafts=one,
        verify_len=one,
        accepted=one,
        sampled=np.zeros(1, np.bool_),
        altered=np.zeros(1, np.bool_),
        target_tokens=target_tokens,
        verify_s=verify_s,
        num_blocks=num_blocks,
        draft_s=draft_s,
        context_tokens=context_tokens,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target_tokens", (), "verify_s: got 5 values"),
        ("target_tokens", (1, 8, 8, 65, 256), "allowed are ascending sizes"),
        ("target_tokens", (0, 8, 64, 65, 256), "whole numbers >= 1"),
        ("verify_s", (0.01, -0.014, 0.03, 0.04, 0.1), "verify_s: got -0.014 at 8"),
        ("verify_s", (0.01, float("nan"), 0.03, 0.04, 0.1), "verify_s: got nan at 8"),
        ("verify_s", (0.01, 0.014, 0.03, 0.04, float("inf")), "verify_s: got inf at 256"),
        ("draft_s", (0.003, 0.0), "draft_s: got 0.0 at 64"),
        ("row_context_s", -1e-9, "row_context_s: got -1e-09"),
        ("context_s", float("nan"), "context_s: got nan"),
    ],
)
def test_what_cannot_be_a_curve_is_refused_by_name_and_value(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CURVE, **{field: value})


def test_an_empty_a_single_and_a_flat_curve_are_refused() -> None:
    with pytest.raises(ConfigError, match="got an empty curve"):
        CostCurve(target_tokens=(), verify_s=())
    with pytest.raises(ConfigError, match="got one size"):
        CostCurve(target_tokens=(4,), verify_s=(0.1,)).check_measured()
    with pytest.raises(ConfigError, match="got a flat curve"):
        CostCurve(target_tokens=(1, 64), verify_s=(0.1, 0.101)).check_measured()


def test_a_capacity_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    CapacityFile(fingerprint=HERE, curve=CURVE).save(path)
    loaded = CapacityFile.load(path)
    assert loaded == CapacityFile(fingerprint=HERE, curve=CURVE)
    loaded.check_fingerprint(HERE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", "cpu b"),
        ("executor", "torch"),
        ("dtype", "float32"),
        ("num_threads", 4),
        ("target_hash", "t2"),
        ("drafter", "d2"),
    ],
)
def test_a_curve_of_another_set_up_is_refused_naming_both(field: str, value: object) -> None:
    other = replace(HERE, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        CapacityFile(fingerprint=other, curve=CURVE).check_fingerprint(HERE)
    message = str(error.value)
    assert f"{field} is {value!r} in the file and {getattr(HERE, field)!r} here" in message
    assert message.count(" is ") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version is 2, allowed is 1"),
        ({"curve": None}, "curve: got None"),
        ({"curve": {**asdict(CURVE), "magic": 1}}, "curve: unknown field 'magic'"),
        ({"curve": {**asdict(CURVE), "verify_s": [0.01] * 5}}, "flat curve"),
        ({"curve": {"target_tokens": [1, 2]}}, "verify_s"),
        ({"fingerprint": {"machine": "a"}}, "executor"),
    ],
)
def test_a_broken_capacity_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "capacity.json"
    whole = {"format_version": 1, "fingerprint": asdict(HERE), "curve": asdict(CURVE)}
    path.write_text(json.dumps({**whole, **change}))
    with pytest.raises(ConfigError, match=message) as error:
        CapacityFile.load(path)
    assert str(path) in str(error.value)
    path.write_text("{")
    with pytest.raises(ConfigError, match="not a capacity file"):
        CapacityFile.load(path)


def test_the_curve_is_linear_between_points_and_keeps_its_cliffs() -> None:
    model = CostModel(CURVE)
    seconds = model.verify_s(1, 256)
    assert seconds[[0, 7, 63, 64, 255]] == pytest.approx(CURVE.verify_s)
    assert seconds[35] == pytest.approx(0.022)  # half way from 8 to 64
    assert seconds[64] - seconds[63] == pytest.approx(0.010)
    assert model.steps_per_second(8) == pytest.approx(1 / 0.014)
    assert model.draft_s(1) == pytest.approx(0.003) and model.draft_s(64) == pytest.approx(0.020)
    assert model.draft_s(0) == 0.0


def test_beyond_the_last_size_the_mean_slope_goes_on() -> None:
    model = CostModel(CURVE)
    assert model.verify_s(511, 1)[0] == pytest.approx(0.100 + 255 * 0.09 / 255)


def test_context_is_charged_by_row_and_by_cached_token() -> None:
    model = CostModel(replace(CURVE, row_context_s=1e-6, context_s=1e-7))
    extra = model.verify_s(8, 2, num_sequences=4, context_tokens=4000) - model.verify_s(8, 2)
    assert extra == pytest.approx([8 * 1000 * 1e-6 + 4e-4, 9 * 1000 * 1e-6 + 4e-4])


def test_a_machine_that_became_slower_is_followed() -> None:
    model = CostModel(CURVE)
    truth = CostModel(CURVE)
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = int(rng.integers(1, 200))
        seconds = 1.5 * float(truth.verify_s(rows, 1)[0]) * float(np.exp(0.03 * rng.normal()))
        model.observe(step(target_tokens=rows, verify_s=seconds))
    assert model.verify_s(1, 200) == pytest.approx(1.5 * truth.verify_s(1, 200), rel=0.08)
    assert model.error < 0.05


def test_a_curve_that_is_fifteen_percent_off_is_put_right_within_the_first_steps() -> None:
    model, truth = CostModel(CURVE), CostModel(CURVE)
    rows = (5, 6, 8, 3)
    foreseen_s = []
    for number in range(64):
        size = rows[number % 4]
        foreseen_s.append(float(model.verify_s(size, 1)[0]) / (1.15 * float(truth.verify_s(size, 1)[0])))
        model.observe(step(target_tokens=size, verify_s=1.15 * float(truth.verify_s(size, 1)[0])))
    assert foreseen_s[0] < 0.88
    assert all(abs(ratio - 1.0) < 0.04 for ratio in foreseen_s[16:])


def test_a_shifting_load_is_predicted_within_ten_percent() -> None:
    """A curve that is wrong in shape, noise of 5 %, one step in twenty three times as slow."""
    model = CostModel(replace(CURVE, verify_s=(0.012, 0.013, 0.020, 0.050, 0.080)))
    truth = CostModel(CURVE)
    rng = np.random.default_rng(1)
    for t in range(2000):
        rows = int(np.clip(100 + 90 * np.sin(t / 150) + rng.normal(0, 8), 1, 256))
        seconds = float(truth.verify_s(rows, 1)[0]) * float(np.exp(0.05 * rng.normal()))
        model.observe(step(target_tokens=rows, verify_s=3 * seconds if t % 20 == 7 else seconds))
    assert model.error < 0.10


def test_what_cached_tokens_take_is_learnt_where_the_curve_does_not_tell_it() -> None:
    """Contexts that grow and start anew, a machine that is at times half as fast: within the noise of the steps."""
    model, truth = CostModel(CURVE), CostModel(CURVE)
    rng, slow = np.random.default_rng(4), 1.0
    for t in range(1500):
        if t % 100 == 0:
            slow = float(rng.choice([1.0, 1.3, 1.9]))
        rows = int(rng.integers(1, 12)) if t % 400 < 200 else int(rng.integers(40, 64))
        context = rows * (100 + 7 * (t % 200))
        seconds = float(truth.verify_s(rows, 1)[0]) + 1.2e-6 * context
        noise = slow * float(np.exp(0.05 * rng.normal()))
        model.observe(
            step(
                target_tokens=rows,
                verify_s=(3 if t % 25 == 7 else 1) * noise * seconds,
                context_tokens=context,
            )
        )
    assert model.error < 0.06  # half of all steps are off by 3.4 % whoever foresees them


def test_the_error_is_that_of_whole_steps_drafting_included() -> None:
    model = CostModel(CURVE)
    for _ in range(40):
        model.observe(step(target_tokens=8, verify_s=0.014, num_blocks=1, draft_s=0.003))
    assert model.error < 0.001
    for t in range(130):
        draft_s = 0.001 if t % 2 else 0.006
        model.observe(step(target_tokens=8, verify_s=0.014, num_blocks=1, draft_s=draft_s))
    assert model.error > 0.1  # the pass is foreseen; the drafting, now short and now long, is not


def test_single_slow_steps_hardly_move_the_curve() -> None:
    model = CostModel(CURVE)
    for _ in range(50):
        model.observe(step(target_tokens=8, verify_s=0.014))
    model.observe(step(target_tokens=8, verify_s=14.0))
    model.flush()
    assert model.verify_s(8, 1)[0] == pytest.approx(0.014, rel=0.03)


def test_times_that_make_no_sense_are_ignored() -> None:
    model = CostModel(CURVE)
    before = model.verify_s(1, 64).copy()
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(step(target_tokens=8, verify_s=bad, num_blocks=2, draft_s=bad))
    assert np.array_equal(model.verify_s(1, 64), before)
    assert model.error == 0.0


def test_without_a_curve_costs_are_learnt_from_served_steps() -> None:
    model = CostModel()
    assert not model.measured
    assert model.draft_s(4) == 0.0
    rng = np.random.default_rng(2)
    for _ in range(400):
        rows = int(rng.choice([1, 2, 4, 8]))
        seconds = (0.010 + 0.0008 * (rows - 1)) * float(np.exp(0.05 * rng.normal()))
        model.observe(step(target_tokens=rows, verify_s=seconds, num_blocks=1, draft_s=0.004))
    assert model.measured
    assert model.verify_s(1, 8)[[0, 1, 3, 7]] == pytest.approx([0.010, 0.0108, 0.0124, 0.0156], rel=0.06)
    assert model.draft_s(1) == pytest.approx(0.004, rel=0.05)


def test_a_slow_first_step_does_not_stick() -> None:
    model = CostModel()
    for seconds in (0.5, 0.010, 0.010, 0.010):
        model.observe(step(target_tokens=1, verify_s=seconds))
    assert model.verify_s(1, 1)[0] == pytest.approx(0.010, rel=0.05)


def test_more_rows_never_cost_less_whatever_was_seen() -> None:
    model = CostModel()
    rng = np.random.default_rng(3)
    for _ in range(300):
        rows = int(rng.integers(1, 40))
        odd = 1.6 if rows == 2 else 1.0  # a size that only ever comes with other work
        model.observe(
            step(target_tokens=rows, verify_s=odd * (0.010 + 0.0005 * rows) * float(rng.uniform(0.8, 1.2)))
        )
    assert (np.diff(model.verify_s(1, 100)) >= 0).all()


def test_a_slope_that_is_half_the_true_one_is_learnt_within_thirty_steps() -> None:
    """As where drafts are verified now and then: bare anchors, and eight rows more."""
    rng = np.random.default_rng(5)
    model = CostModel(
        CostCurve(target_tokens=(1, 8, 16, 24, 32), verify_s=(0.0063, 0.0071, 0.0079, 0.0091, 0.0119))
    )

    def true_s(rows: int) -> float:
        return 0.0085 + 0.0003 * (rows - 16)

    for number in range(30):
        rows = 24 if number % 3 else 16
        model.observe(step(target_tokens=rows, verify_s=true_s(rows) * float(np.exp(0.04 * rng.normal()))))
    model.flush()
    bare, more = (float(model.verify_s(rows, 1)[0]) for rows in (16, 24))
    assert bare == pytest.approx(true_s(16), rel=0.03)
    assert more - bare == pytest.approx(0.0024, rel=0.3)  # the curve had 0.0012


def test_slow_first_steps_do_not_bend_the_curve() -> None:
    model = CostModel(CostCurve(target_tokens=(1, 16, 32), verify_s=(0.006, 0.008, 0.012)))
    for number in range(40):
        rows = 16 + 4 * (number % 5)
        model.observe(
            step(
                target_tokens=rows,
                verify_s=(0.008 + 0.00025 * (rows - 16)) * (1.0 + 2.5 * float(np.exp(-number / 3))),
            )
        )
    model.flush()
    assert float(model.verify_s(16, 1)[0]) == pytest.approx(0.008, rel=0.05)
    assert float(model.verify_s(32, 1)[0]) == pytest.approx(0.012, rel=0.05)


def test_many_blocks_are_not_taken_for_the_price_of_the_one_that_was_measured() -> None:
    one = CostCurve(target_tokens=(1, 8), verify_s=(0.006, 0.007), num_blocks=(1,), draft_s=(0.0004,))
    seconds = CostModel(one).draft_s_range(16)
    assert seconds[0] == pytest.approx(0.0004)
    assert seconds[15] > 3 * seconds[0]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_a_curve_is_still_one_after_a_day_of_every_load(noise: float) -> None:
    """Rounding adds up: after a hundred batches the belief was no covariance any more, and nothing was foreseen."""
    rng = np.random.default_rng(3)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    curve = CorrectedCurve(sizes, tuple(0.006 + 0.00015 * size for size in sizes), prior_weight=16.0)
    for batch in range(2400):
        load = 64 >> min(batch // 400, 6)
        rows = (load * rng.integers(1, 6, size=24)).tolist()
        tokens = (load * rng.integers(60, 250, size=24)).astype(float).tolist()
        pace = 1.6 if batch % 500 < 100 else 1.0
        seconds = [
            pace * (0.006 + 0.00013 * r) * math.exp(noise * rng.normal()) + 1.5e-6 * t
            for r, t in zip(rows, tokens, strict=True)
        ]
        foreseen = curve.observe(rows, seconds, tokens=tokens, known_s=[0.0] * 24)
        assert np.isfinite(foreseen).all(), f"batch {batch}"
    assert curve.error < 0.02 + noise
    assert curve.token_s == pytest.approx(1.5e-6, rel=0.3 + 2 * noise)
