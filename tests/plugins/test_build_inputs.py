"""What makes a build new, and what a build may share a folder with."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CapacityError, ConfigError
from dspark.executors.tensorrt_bindings import Binding
from dspark.models.loading import load_target
from dspark_build.engine_profiles import EngineLimits, profile_shapes, profiles_of
from dspark_build.export_inputs import EXPORT_SOURCES, inputs_hash
from dspark_build.folder_lock import locked_folder, remove_abandoned
from support.tiny_drafters import write_tiny_drafter
from support.tiny_models import DictWeights, random_weights, tiny_config, write_tiny_target

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

from dspark_build import engine, export  # noqa: E402
from dspark_build.export import ExportJob, export_pair  # noqa: E402
from dspark_build.export_decoder import DecoderGraph  # noqa: E402
from dspark_build.export_weights import WeightFile  # noqa: E402

LIMITS = EngineLimits(max_batch=3, max_tokens=32, max_pages=8, page_size=4, block_size=4)


@pytest.fixture
def job(tmp_path: Path) -> ExportJob:
    write_tiny_target(tmp_path / "target")
    write_tiny_drafter(tmp_path / "drafter", tmp_path / "target", rank=8)
    target = load_target(tmp_path / "target")
    drafter = load_drafter_checkpoint(tmp_path / "drafter", target=target.config)
    return ExportJob(target=target, drafter=drafter, precision="fp16", page_size=4)


def flip(path: Path) -> None:
    """Change the last byte of a file; its size stays."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def same_size_target(job: ExportJob, home: Path) -> ExportJob:
    flip(home / "target" / "model.safetensors")
    return replace(job, target=load_target(home / "target"))


def same_size_drafter(job: ExportJob, home: Path) -> ExportJob:
    flip(home / "drafter" / "model.safetensors")
    return job


@pytest.mark.parametrize("change", [same_size_target, same_size_drafter])
def test_weights_of_the_same_size_are_other_inputs(
    change: Callable[[ExportJob, Path], ExportJob], job: ExportJob, tmp_path: Path
) -> None:
    def told(job: ExportJob) -> tuple[str, str]:
        return engine._inputs(job, LIMITS, 89, {}), export._inputs(job)

    before = told(job)
    after = told(change(job, tmp_path))
    assert before[0] != after[0] and before[1] != after[1]


def test_every_option_that_decides_a_plan_is_an_input(job: ExportJob) -> None:
    names = ("max_batch", "max_tokens", "max_pages", "page_size", "block_size")
    limits = [LIMITS, *(replace(LIMITS, **{name: 2 * getattr(LIMITS, name)}) for name in names)]
    told = [engine._inputs(job, one, 89, {}) for one in limits]
    told.append(engine._inputs(job, LIMITS, 86, {}))
    told.append(engine._inputs(replace(job, precision="fp32"), LIMITS, 89, {}))
    told.append(engine._inputs(replace(job, drafter=None), LIMITS, 89, {}))
    told.append(engine._inputs(job, LIMITS, 89, {"tensorrt": "another"}))
    assert len(set(told)) == len(told)


def test_the_code_that_reads_checkpoints_is_an_input(tmp_path: Path) -> None:
    names = {path.name for path in EXPORT_SOURCES}
    assert {"rope.py", "hf.py", "gguf_target.py", "tensorrt_bindings.py", "export_target.py"} <= names
    source = tmp_path / "rope.py"
    source.write_text("a = 1")
    before = inputs_hash("told", [source])
    source.write_text("a = 2")
    assert inputs_hash("told", [source]) != before != inputs_hash("other", [source])


def hold(folder: Path) -> int:
    """Hold a folder as another process would."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_a_folder_is_built_in_once_at_a_time(tmp_path: Path) -> None:
    handle = hold(tmp_path / "out")
    with (
        pytest.raises(ConfigError, match="--out: another build is at work in"),
        locked_folder(tmp_path / "out"),
    ):
        pass
    os.close(handle)
    with locked_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").is_dir()


def test_a_build_that_fails_leaves_no_folder_of_its_own(tmp_path: Path) -> None:
    with (
        pytest.raises(CapacityError, match="disk full while building in .*; free space"),
        locked_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, "no space")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ConfigError, match="cannot be used"),
        locked_folder(tmp_path / "file" / "out"),
    ):
        pass


def test_only_what_nobody_holds_is_abandoned(tmp_path: Path) -> None:
    handle = hold(tmp_path / ".out.new-1")
    (tmp_path / ".out.new-2" / "deep").mkdir(parents=True)
    (tmp_path / ".target.plan.part").write_text("half")
    (tmp_path / "target.plan").write_text("whole")
    remove_abandoned(tmp_path, ".out.new-*", ".*.part")
    assert {path.name for path in tmp_path.iterdir()} == {".out.new-1", "target.plan"}
    os.close(handle)


def test_an_export_of_another_process_in_between_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename, times = tmp_path / "out", os.rename, iter(range(9))

    def late(source: Path, target: Path) -> None:
        if Path(target) == out and next(times) == 0:
            out.mkdir()
            (out / "export.json").write_text("of another process")
        rename(source, target)

    monkeypatch.setattr(export.os, "rename", late)
    (tmp_path / ".out.new-dead").mkdir()
    with export._fresh_folder(out) as fresh:
        (fresh / "export.json").write_text("mine")
    assert (out / "export.json").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_while_exporting_names_the_folder(
    job: ExportJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(WeightFile, "add", full)
    with pytest.raises(CapacityError, match=f"disk full while building in {tmp_path / 'out'};"):
        export_pair(job, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(("precision", "allowed"), [("fp16", "bf16 or fp32"), ("bf16", "fp32")])
def test_a_value_that_fp16_cannot_hold_is_named(precision: Any, allowed: str) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["embed_tokens.weight"][3, 1] = 1e5
    graph = DecoderGraph(config.decoder, DictWeights(weights), WeightFile(io.BytesIO(), "x.data"), precision)
    with pytest.raises(ConfigError, match=f"embed_tokens has values up to 100000, .*allowed is {allowed}"):
        graph.matrix("embed_tokens", "fp16")
    assert graph.stored("fits", np.full((2, 2), 65504, np.float32), "fp16") == "fits"


def test_an_output_that_is_too_large_is_named_with_its_options() -> None:
    limits = EngineLimits(max_batch=2048, max_tokens=8, max_pages=4, page_size=16, block_size=7)
    logits = Binding("logits", "fp32", ("M", 151936), "output")
    with pytest.raises(ConfigError, match="^--max-batch: logits would have"):
        profile_shapes([logits], profiles_of(limits)[0])
    features = Binding("features", "fp32", ("N", 1 << 20))
    with pytest.raises(ConfigError, match="^--max-batch, --max-tokens: features would have"):
        profile_shapes([features], profiles_of(limits)[0])
