"""`executor: tensorrt | onnxruntime` and `engine:`: from settings to answers, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dspark import capacity
from dspark.capacity import fingerprint_of
from dspark.cli import main
from dspark.config import ServeConfig, load_serve_config
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.engine.engine import Engine
from dspark.errors import CheckpointError, ConfigError
from dspark.executors.loading import choose_executor
from dspark.models.loading import load_target
from dspark.runtime import build_engine
from support.engines import answers, make_engine, make_request
from support.tiny_drafters import write_good_drafter
from support.tiny_models import write_tiny_target

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from dspark_build.export import ExportJob, export_pair

PAGE = 4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 5, 8, 9], [7, 7, 8, 7, 7, 8, 7, 7]]
LIMITS = {"max_batch": 4, "max_tokens": 8, "max_pages": 18, "page_size": PAGE, "block_size": 4}
BUILT = {"format_version": 4, "limits": LIMITS, "sm": 89, "tools": {"tensorrt": "tensorrt_rtx 1.7"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, drafter, onnx (their export) and plans (the same, as if engines had been built from it)."""
    home = tmp_path_factory.mktemp("home")
    write_tiny_target(home / "target", max_context_len=64)
    write_good_drafter(home / "drafter", home / "target", noise=0.1)
    target = load_target(home / "target")
    drafter = load_drafter_checkpoint(home / "drafter", target=target.config)
    job = ExportJob(target=target, drafter=drafter, precision="fp32", page_size=PAGE)
    export_pair(job, home / "onnx")
    shutil.copytree(home / "onnx", home / "plans")
    (home / "plans" / "engine.json").write_text(json.dumps(BUILT))
    return home


def settings(home: Path, **changes: object) -> dict[str, object]:
    return {
        "target": str(home / "target"),
        "drafter": str(home / "drafter"),
        "executor": "onnxruntime",
        "engine": str(home / "onnx"),
        "page_size": PAGE,
        "max_batch_size": 4,
        "max_step_tokens": 8,
        "cache_bytes": 1 << 20,
        "num_threads": 1,
        "capacity": "none",
        "policy": "fixed:3",
        **changes,
    }


def start(home: Path, *, base: Path | None = None, **changes: object) -> tuple[Engine, list[str]]:
    told: list[str] = []
    config = ServeConfig(**settings(home, **changes))  # type: ignore[arg-type]
    return build_engine(config, progress=told.append, base=base), told


def test_auto_never_takes_an_engine(home: Path) -> None:
    assert choose_executor("auto") in ("native", "torch")
    engine, told = start(home, executor="torch", dtype="float32")
    assert engine.target.name == "torch"
    assert f"engine: {home / 'onnx'} is left aside by executor torch" in told


@pytest.mark.parametrize("changes", [{}, {"prompt_lookup": True}, {"drafter": "ngram"}, {"policy": "none"}])
def test_greedy_answers_are_those_of_the_torch_executor(home: Path, changes: dict[str, object]) -> None:
    torch = make_engine(**{**settings(home), "executor": "torch", "engine": "", **changes})  # type: ignore[arg-type]
    engine, told = start(home, **changes)
    wanted, got = (
        answers(one, [make_request(prompt, max_tokens=30) for prompt in PROMPTS]) for one in (torch, engine)
    )
    assert got == wanted
    assert engine.target.name == "onnxruntime" and engine.target.dtype == "float32"
    assert any("onnxruntime runs the exported graphs on the CPU" in line for line in told)
    stats = engine.stats()
    assert (stats.num_accepted_tokens > 0) == (changes != {"policy": "none"})
    assert stats.num_drafter_faults == 0
    assert engine.drafter.name == {"prompt_lookup": "dspark+ngram", "drafter": "ngram"}.get(
        next(iter(changes), ""), "dspark"
    )


def test_a_cost_curve_is_measured_and_names_the_executor(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(capacity, "_QUICK_S", 0.5)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    engine, told = start(home, policy="auto", capacity="auto", max_step_tokens=128)
    assert engine.scheduler.cost_model is not None and engine.scheduler.cost_model.measured
    (kept,) = (tmp_path / "capacity").iterdir()
    assert json.loads(kept.read_text())["fingerprint"]["executor"] == "onnxruntime"
    assert fingerprint_of(engine.target, drafter="ngram").executor == "onnxruntime"

    _, told = start(home, policy="auto", capacity="auto", max_step_tokens=8, dtype="float32", num_threads=2)
    assert any("not measured, it is learnt while serving: rows of a pass: got" in line for line in told)
    with pytest.raises(ConfigError, match="executor is 'onnxruntime' in the file and"):
        start(home, policy="auto", capacity=str(kept), executor="torch", dtype="float32")


def test_the_command_line_gives_the_same_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_target(tmp_path / "target", max_context_len=64)
    target = load_target(tmp_path / "target")
    export_pair(ExportJob(target=target, drafter=None, precision="fp32", page_size=16), tmp_path / "onnx")
    line = ["generate", "--target", str(tmp_path / "target"), "--prompt-ids", "5,6,5,6,5", "--json"]
    line += ["--temperature", "0", "--ignore-eos", "--capacity", "none", "--dtype", "float32"]
    line += ["--max-tokens", "12", "--threads", "1", "--cache-bytes", "1MiB", "--max-batch", "2"]
    found = []
    for more in (["--executor", "torch"], ["--executor", "onnxruntime", "--engine", str(tmp_path / "onnx")]):
        assert main([*line, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["output_ids"])
    assert found[0] == found[1] and len(found[0]) == 12

    assert main([*line, "--executor", "tensorrt"]) == 2
    told = capsys.readouterr().err
    assert "engine: not given; executor tensorrt runs a folder of `dspark-build engine`" in told


def test_the_folder_may_lie_beside_model_yaml(home: Path) -> None:
    (home / "model.yaml").write_text("target: x\nexecutor: onnxruntime\nengine: onnx\n")
    named = load_serve_config(home / "model.yaml", environ={})
    assert (named.executor, named.engine) == ("onnxruntime", "onnx")
    engine, _ = start(home, engine=named.engine, base=home)
    assert engine.target.name == "onnxruntime"
    with pytest.raises(
        ConfigError, match=r"engine: got 'onnx', which is no folder; make one with `dspark-build"
    ):
        start(home, engine=named.engine)


def test_engines_that_do_not_fit_are_refused(home: Path, tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "other", seed=1, max_context_len=64)
    with pytest.raises(CheckpointError, match="target_hash: the export was made for"):
        start(home, target=str(tmp_path / "other"), drafter="none")
    write_good_drafter(tmp_path / "drafter", home / "target", noise=0.2)
    with pytest.raises(CheckpointError, match="drafter_hash: the export was made for"):
        start(home, drafter=str(tmp_path / "drafter"))
    with pytest.raises(
        CheckpointError, match=r"page_size: .* made for 4, asked for is 16; set page_size: 4, or"
    ):
        start(home, page_size=16)
    with pytest.raises(CheckpointError, match=r"has no export.json; make it with `dspark-build export`"):
        start(home, engine=str(home / "target"))
    with pytest.raises(CheckpointError, match=r"has no engine.json; make it with `dspark-build engine`"):
        start(home, executor="tensorrt")
    with pytest.raises(
        ConfigError, match=r"dtype: got 'float16', the engine in .* computes in float32; allowed is"
    ):
        start(home, dtype="float16")
    with pytest.raises(ConfigError, match="max_context_len: got 65, allowed is at most the model's 64"):
        start(home, max_context_len=65)


def test_limits_beyond_what_was_built_are_told_at_once(home: Path) -> None:
    plans = {"executor": "tensorrt", "engine": str(home / "plans")}
    with pytest.raises(ConfigError) as caught:
        start(home, **plans, dtype="bfloat16", max_batch_size=5, max_step_tokens=9, max_context_len=65)
    told = str(caught.value).splitlines()
    assert [line.split(",")[0] for line in told] == [
        "dtype: got 'bfloat16'",
        "max_batch_size: got 5",
        "max_step_tokens: got 9",
        "max_context_len: got 65",
    ]
    for line, most in zip(told[1:], (4, 8, 64), strict=True):
        assert f"allowed is at most {most}: the engine in {home / 'plans'} was built for no more" in line
    with pytest.raises(ConfigError, match="max_batch_size: got 4, allowed is at most 2"):
        start(home, **plans, drafter="ngram")  # whose blocks are longer: 8 drafts


def test_what_was_built_for_less_context_than_the_model_has_takes_that(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "plans", tmp_path / "plans")
    (tmp_path / "plans" / "engine.json").write_text(
        json.dumps(BUILT | {"limits": {**LIMITS, "max_pages": 10}})
    )
    with pytest.raises(ConfigError, match=r"max_context_len: got 33, allowed is at most 32"):
        start(home, executor="tensorrt", engine=str(tmp_path / "plans"), max_context_len=33)


def test_without_a_gpu_or_a_graph_it_says_what_is_missing(home: Path, tmp_path: Path) -> None:
    import torch

    shutil.copytree(home / "onnx", tmp_path / "onnx")
    manifest = json.loads((tmp_path / "onnx" / "export.json").read_text())
    manifest["files"] = []  # as beside plans, where the graphs are not kept
    (tmp_path / "onnx" / "export.json").write_text(json.dumps(manifest))
    (tmp_path / "onnx" / "target.onnx").unlink()
    with pytest.raises(
        CheckpointError, match=r"target.onnx is missing; ONNX Runtime runs what `dspark-build export`"
    ):
        start(home, engine=str(tmp_path / "onnx"))
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="executor: tensorrt needs (a CUDA GPU|cuda-bindings)"):
        start(home, executor="tensorrt", engine=str(home / "plans"))
