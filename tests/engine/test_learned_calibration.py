"""What the calibrator learns is kept where the settings ask for it, and found again by the next start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dspark.calibration.online import OnlineCalibrator
from dspark.config import ServeConfig
from dspark.drafters.identity import drafter_identity
from dspark.errors import ConfigError
from dspark.generate import complete_all
from dspark.runtime import Runtime, build_engine, load_runtime
from support.engines import make_request
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ServeConfig:
    target = write_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2)
    drafter = tmp_path_factory.mktemp("drafter")
    write_good_drafter(drafter, target)
    return ServeConfig(
        target=str(target),
        drafter=str(drafter),
        executor="torch",
        dtype="float32",
        policy="fixed:4",
        num_threads=1,
        cache_bytes=1 << 22,
        capacity="none",
    )


def serve(config: ServeConfig, *, num_requests: int = 6) -> Runtime:
    """Run some requests through an engine thread and stop it."""
    runtime = load_runtime(config)
    for i in range(num_requests):
        runtime.engine.submit(make_request([i, i + 1], max_tokens=60))
    assert runtime.engine.drain(60.0)
    runtime.engine.close()
    return runtime


def calibrator_of(config: ServeConfig) -> OnlineCalibrator:
    calibrator = build_engine(config).scheduler.calibrator
    assert isinstance(calibrator, OnlineCalibrator)
    return calibrator


def test_what_was_learnt_is_kept_at_the_end_and_found_at_the_next_start(
    pair: ServeConfig, tmp_path: Path
) -> None:
    config = replace(pair, learned_calibration=str(tmp_path / "deep" / "learned.json"))
    runtime = serve(config)
    learnt = runtime.scheduler.calibrator
    assert isinstance(learnt, OnlineCalibrator) and learnt.num_labels > 100
    again = calibrator_of(config)
    parameters = learnt.parameters(sampled=False)
    assert np.allclose(again.parameters(sampled=False), parameters)
    assert not np.allclose(parameters, OnlineCalibrator(block_size=4).parameters(sampled=False))


def test_nothing_is_kept_unless_asked(
    pair: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.runtime.state_dir", lambda: tmp_path)
    serve(pair)
    assert list(tmp_path.iterdir()) == []
    serve(replace(pair, learned_calibration="auto"))
    (kept,) = (tmp_path / "calibration").iterdir()
    assert drafter_identity(pair.drafter).startswith(kept.stem)


def test_what_was_learnt_stays_the_word_of_the_drafter_that_served_when_its_files_are_replaced(
    pair: ServeConfig, tmp_path: Path
) -> None:
    shutil.copytree(pair.drafter, tmp_path / "drafter")
    config = replace(
        pair, drafter=str(tmp_path / "drafter"), learned_calibration=str(tmp_path / "learned.json")
    )
    served = drafter_identity(config.drafter)
    runtime = load_runtime(config)
    write_good_drafter(
        Path(config.drafter), pair.target, seed=7, noise=0.5
    )  # a newer one, for the next start
    runtime.engine.close()
    assert drafter_identity(config.drafter) != served
    assert json.loads((tmp_path / "learned.json").read_text())["made_for"] == served


def test_a_state_learnt_with_another_drafter_is_refused(pair: ServeConfig, tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    path.write_text(json.dumps(OnlineCalibrator(block_size=4).state(made_for="another")))
    with pytest.raises(ConfigError, match="made_for is 'another' there and"):
        build_engine(replace(pair, learned_calibration=str(path)))


def test_the_offline_fit_is_read_from_the_drafters_folder_or_the_named_file(
    pair: ServeConfig, tmp_path: Path
) -> None:
    fit = {
        "format_version": 1,
        "block_size": 4,
        "target_hash": build_engine(pair).target.config.model_hash,
        "drafter_hash": drafter_identity(pair.drafter),
        "sts_temperatures": [1.5, 1.25, 2.0, 0.5],
    }
    (tmp_path / "fit.json").write_text(json.dumps(fit))
    named = replace(pair, calibration=str(tmp_path / "fit.json"))
    assert calibrator_of(named).temperatures.tolist() == fit["sts_temperatures"]
    beside = Path(pair.drafter) / "calibration.json"
    try:
        beside.write_text(json.dumps(fit))
        assert calibrator_of(pair).temperatures.tolist() == fit["sts_temperatures"]
        assert calibrator_of(replace(pair, calibration="none")).temperatures.tolist() == [1.0] * 4
    finally:
        beside.unlink()
    with pytest.raises(ConfigError, match="calibration: got 'nowhere', allowed is a file, auto or none"):
        build_engine(replace(pair, calibration="nowhere"))


def test_a_state_that_cannot_be_written_ends_the_engine_all_the_same(
    pair: ServeConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    runtime = serve(
        replace(pair, learned_calibration=str(tmp_path / "file" / "learned.json")), num_requests=1
    )
    assert not runtime.engine.alive and not runtime.engine.died


def test_answers_do_not_depend_on_what_the_calibrator_knows(pair: ServeConfig, tmp_path: Path) -> None:
    config = replace(pair, learned_calibration=str(tmp_path / "learned.json"), policy="threshold:0.5")
    requests = [make_request([i, i + 1], max_tokens=40) for i in range(4)]
    before = [done.token_ids for done in complete_all(build_engine(config), requests)]
    serve(config)
    assert [done.token_ids for done in complete_all(build_engine(config), requests)] == before
