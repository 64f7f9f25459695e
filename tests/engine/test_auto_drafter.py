"""`drafter: auto`: the trained drafter beside model.yaml where it is of the target that is served, else look-up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dspark.config import ServeConfig
from dspark.errors import CheckpointError
from dspark.runtime import build_engine
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("version")
    target = write_tiny_target(folder / "target", num_layers=2)
    write_good_drafter(folder / "drafter", target)
    write_tiny_target(folder / "other", num_layers=2, seed=5)
    return folder


def drafter_name(base: Path, target: str, said: list[str], *, prompt_lookup: bool = False) -> str:
    config = ServeConfig(
        target=str(base / target),
        executor="torch",
        dtype="float32",
        policy="fixed:2",
        num_threads=1,
        cache_bytes=1 << 22,
        prompt_lookup=prompt_lookup,
    )
    return build_engine(config, progress=said.append, base=base).drafter.name


def test_the_trained_drafter_serves_its_own_target_and_no_other(base: Path) -> None:
    said: list[str] = []
    model_hash = config_of(base)["target_hash"]
    assert model_hash and drafter_name(base, "target", said) == "dspark"
    assert not any("another target" in line for line in said)
    assert drafter_name(base, "other", said) == "ngram"
    assert any("another target" in line for line in said)


def test_look_up_goes_before_it_where_the_settings_ask_for_it(base: Path) -> None:
    assert drafter_name(base, "target", [], prompt_lookup=True) == "dspark+ngram"
    assert drafter_name(base, "other", [], prompt_lookup=True) == "ngram"


def test_a_drafter_whose_configuration_cannot_be_read_is_no_silent_fall_back(tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "target", num_layers=2)
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json"):
        drafter_name(tmp_path, "target", [])


def config_of(base: Path) -> dict[str, str]:
    read: dict[str, str] = json.loads((base / "drafter" / "config.json").read_text())
    return read
