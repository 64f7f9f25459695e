"""Where an engine's cost curve comes from: a named file, one beside model.yaml, one kept, or one measured now."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import dspark.capacity as capacity
import pytest
from dspark.capacity import fingerprint_of
from dspark.config import ServeConfig
from dspark.engine.engine import Engine
from dspark.errors import ConfigError
from dspark.runtime import build_engine
from dspark.scheduling.cost_model import CapacityFile, CostCurve
from support.engines import make_engine, make_request, run
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

CURVE = CostCurve(target_tokens=(1, 8, 64), verify_s=(0.001, 0.002, 0.016), num_blocks=(1,), draft_s=(1e-4,))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own, on a machine that is not busy."""
    monkeypatch.setattr(capacity, "state_dir", lambda: tmp_path / "state")
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path / "state"


def start(target: Path, *, base: Path | None = None, **settings: object) -> tuple[Engine, list[str]]:
    told: list[str] = []
    values = {"policy": "auto", "drafter": "ngram", "executor": "torch", "dtype": "float32", "num_threads": 1}
    config = ServeConfig(target=str(target), **{**values, "cache_bytes": 1 << 22, **settings})  # type: ignore[arg-type]
    return build_engine(config, progress=told.append, base=base), told


def written(folder: Path, engine: Engine, **changes: object) -> Path:
    fingerprint = fingerprint_of(engine.target, drafter="ngram", num_threads=1)
    path = folder / "capacity.json"
    CapacityFile(fingerprint=replace(fingerprint, **changes), curve=CURVE).save(path)  # type: ignore[arg-type]
    return path


def first_row_s(engine: Engine) -> float:
    return 1.0 / engine.scheduler.cost_model.steps_per_second(1)  # type: ignore[union-attr]


def test_a_missing_curve_is_measured_once_told_and_found_again(target: Path, state: Path) -> None:
    engine, told = start(target)
    assert engine.scheduler.cost_model.measured  # type: ignore[union-attr]
    assert any("measuring this machine" in line for line in told)
    (kept,) = (state / "capacity").iterdir()
    assert CapacityFile.load(kept).fingerprint == fingerprint_of(
        engine.target, drafter="ngram", num_threads=1
    )
    run(engine, [make_request([1, 2, 3])])  # measuring left the caches as good as new

    again, told = start(target)
    assert not any("measuring" in line for line in told)
    assert first_row_s(again) == pytest.approx(CapacityFile.load(kept).curve.verify_s[0])


def test_a_curve_of_trees_is_not_taken_for_one_of_chains(
    target: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "_QUICK_S", 0.3)
    write_good_drafter(tmp_path / "drafter", target)
    for size, measured in ((0, True), (8, True), (8, False)):
        _, told = start(target, drafter=str(tmp_path / "drafter"), draft_tree=size)
        assert any("measuring" in line for line in told) == measured, size
    assert len(list((state / "capacity").iterdir())) == 2


def test_a_curve_of_single_requests_is_not_taken_for_one_of_many(
    target: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "_QUICK_S", 0.3)
    for size, measured in ((1, True), (8, True), (8, False), (1, False)):
        _, told = start(target, max_batch_size=size)
        assert any("measuring" in line for line in told) == measured, size
    assert len(list((state / "capacity").iterdir())) == 2


def test_answers_do_not_depend_on_whether_the_machine_was_measured(target: Path) -> None:
    requests = [make_request([i, 4, 8, 15, 4, 8, 15], max_tokens=40) for i in range(4)]
    plain = [done.token_ids for done in run(make_engine(target), requests)]
    engine, _ = start(target)
    assert [done.token_ids for done in run(engine, requests)] == plain


def test_other_work_on_the_machine_means_that_nothing_is_kept(
    target: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e3, 0.0, 0.0))
    engine, told = start(target)
    assert engine.scheduler.cost_model.measured  # type: ignore[union-attr]
    assert any("not kept: other work" in line for line in told)
    assert not state.exists()


def test_a_curve_beside_model_yaml_is_used_where_it_fits_and_told_where_it_does_not(
    target: Path, tmp_path: Path
) -> None:
    probe = make_engine(target, drafter="ngram")
    written(tmp_path, probe)
    engine, told = start(target, base=tmp_path)
    assert first_row_s(engine) == pytest.approx(0.001)
    assert not any("measuring" in line for line in told)

    written(tmp_path, probe, machine="another one")
    _, told = start(target, base=tmp_path)
    assert any("machine is 'another one' in the file" in line for line in told)
    assert any("measuring" in line for line in told)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("machine", "m"),
        ("executor", "tensorrt"),
        ("dtype", "float16"),
        ("num_threads", 7),
        ("target_hash", "0"),
        ("drafter", "none"),
    ],
)
def test_a_named_curve_of_another_set_up_is_refused_by_name(
    target: Path, tmp_path: Path, field: str, value: object
) -> None:
    path = written(tmp_path, make_engine(target, drafter="ngram"), **{field: value})
    with pytest.raises(ConfigError, match=f"{field} is {value!r} in the file and "):
        start(target, capacity=str(path))


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ({"target_tokens": [], "verify_s": []}, "empty curve"),
        ({"target_tokens": [1, 2], "verify_s": [1.0, 1.0]}, "flat curve"),
        ({"target_tokens": [1, 2], "verify_s": [1.0, -2.0]}, "verify_s: got -2.0 at 2"),
        ({"target_tokens": [1, 2], "verify_s": [1.0, float("nan")]}, "verify_s: got nan at 2"),
    ],
)
def test_a_named_curve_that_is_none_is_refused_by_name(
    target: Path, tmp_path: Path, curve: dict[str, object], message: str
) -> None:
    path = written(tmp_path, make_engine(target, drafter="ngram"))
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "curve": curve}))
    with pytest.raises(ConfigError, match=message):
        start(target, capacity=str(path))


def test_a_cache_too_small_to_measure_in_is_told_and_the_curve_is_learnt(target: Path, state: Path) -> None:
    engine, told = start(target, cache_bytes=1 << 15)
    assert any("not measured, it is learnt while serving" in line for line in told)
    assert not engine.scheduler.cost_model.measured  # type: ignore[union-attr]
    assert not state.exists()
    with pytest.raises(ConfigError, match="policy: got 'prefix' without a measured cost curve"):
        start(target, cache_bytes=1 << 15, policy="prefix")


def test_policies_that_weigh_no_cost_measure_nothing(target: Path, state: Path) -> None:
    for policy in ("none", "fixed:3", "threshold:0.5"):
        start(target, policy=policy)
    start(target, drafter="none")
    assert not state.exists()
