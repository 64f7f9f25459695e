"""`dspark-build profile`: the file it writes is one that a server with the same settings takes, and no other."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from dspark.drafters.lookup import LookupDrafter
from dspark.errors import ConfigError
from dspark_build.profile import add_profile_arguments, run_profile
from support.engines import make_engine
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = write_tiny_target(tmp_path / "target", num_layers=1)
    write_good_drafter(tmp_path / "drafter", target, target_layer_ids=(0,))
    return target, tmp_path / "drafter"


def profile(target: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    add_profile_arguments(parser)
    given = ["--target", str(target), "--executor", "torch", "--dtype", "float32", "--threads", "1"]
    return run_profile(parser.parse_args([*given, "--max-batch", "2", "--seconds", "0.5", *options]))


def test_a_curve_of_trees_serves_trees_of_that_size_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = pair
    out = tmp_path / "capacity.json"
    assert profile(target, "--drafter", str(drafter), "--draft-tree", "9", "--out", str(out)) == 0
    settings = {"drafter": drafter, "policy": "auto", "capacity": str(out)}
    engine = make_engine(target, draft_tree=9, **settings)  # type: ignore[arg-type]
    assert engine.drafter.block_size == 9 and not isinstance(engine.drafter, LookupDrafter)
    for size in (0, 8):
        with pytest.raises(ConfigError, match="drafter"):
            make_engine(target, draft_tree=size, **settings)  # type: ignore[arg-type]


def test_trees_are_refused_for_a_drafter_that_makes_none(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--draft-tree: got 4, allowed with drafter ngram is 0"):
        profile(pair[0], "--drafter", "ngram", "--draft-tree", "4", "--out", str(tmp_path / "capacity.json"))
