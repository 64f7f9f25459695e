"""The parts of `tests/gpu/run.sh` that need no GPU: options, cases, summary, and what it says without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dspark.executors.torch_target import TorchTarget
from dspark_build.kernel_report import loads_of
from dspark_plugins.kernels.sets import ModelShape
from support.tiny_drafters import write_good_drafter
from support.tiny_models import DictWeights, random_weights, tiny_config, write_tiny_target

from gpu import check, sections
from gpu.cases import awkward_cases, load_case, moved
from gpu.check import NO_GPU, arguments
from gpu.decode import greedy
from gpu.device import Speed
from gpu.results import Check, Results, Timing
from gpu.section_process import bounded
from gpu.sections import SECTIONS, _as_node, difference, outputs_of

SMALL = ModelShape("small", 4, 2, 16, 24, 300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: run tests/gpu/run.sh")
def test_without_a_gpu_it_says_so_with_a_status_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(__file__).with_name("run.sh"), "--json", tmp_path / "x.json"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (NO_GPU, "")
    assert "no GPU here" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--only", "kernels,speed"], ["--only", ","], ["--minutes", "0"]])
def test_bad_options_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(words)
    assert ended.value.code == 2 and "allowed" in capsys.readouterr().err


def test_every_section_is_run_unless_told_otherwise() -> None:
    assert arguments([]).only == list(SECTIONS)
    assert arguments(["--only", "driver, kernels"]).only == ["driver", "kernels"]


def test_the_plain_versions_take_every_case_and_nodes_have_its_shapes() -> None:
    names = set()
    for case in awkward_cases(torch.bfloat16):
        names.add(case.name)
        given = moved(case.arguments, "cpu")
        made = case.op(*given)
        made = [*made] if isinstance(made, tuple) else [made]
        assert made[0][: case.num_rows].isfinite().all(), case.name
        if case.written is not None:
            made.append(given[case.written])
        operation, inputs = _as_node(case, moved(case.arguments, "cpu"))
        assert len(inputs) == len(operation.inputs), case.name
        shapes = operation.output_shapes([list(x.shape) for x in inputs])
        assert [list(x.shape) for x in made] == shapes, case.name
    assert len(names) == 29
    told = {name.split(",")[0] for name in names}
    assert told == {"paged_attention", "block_attention", "block_sample", "verify", "schedule"}


def test_every_estimate_has_a_call_to_time() -> None:
    for load in loads_of(SMALL):
        context = 2048 if "prompt" in load.what else 40
        case = load_case(load.what, SMALL, num=2, context=context, block=7, rank=8)
        assert outputs_of(case, "cpu")[0].isfinite().all(), load.what


def test_greedy_decoding_in_a_batch_is_that_of_each_alone() -> None:
    config = tiny_config()
    prompts = ([1, 4, 7], [3], [5, 6, 8, 9, 10])

    def target() -> TorchTarget:
        return TorchTarget(config, DictWeights(random_weights(config)), dtype="float32")

    together = greedy(target(), prompts, num_tokens=6)
    assert together.step_s > 0
    assert together.tokens == [greedy(target(), [prompt], num_tokens=6).tokens[0] for prompt in prompts]


def test_a_difference_is_told_where_only_one_has_nan() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert difference(nan, nan) == 0.0
    assert difference(nan, torch.tensor([1.0, 2.0])) == float("inf")
    assert difference(torch.tensor([1.0]), torch.tensor([1.5])) == 0.5


def test_the_summary_tells_failures_shares_and_what_was_left_out() -> None:
    results = Results(machine={"GPU": "some"})
    with results.section("kernels"):
        results.checks += [Check("kernels", "a", True), Check("kernels", "b", False, "off by 1")]
    with results.section("engine"):
        raise RuntimeError("no room")
    floor_s, bound = Speed(bytes_per_s=1e12, flops_per_s=1e15).floor(5e6, 1e6)
    results.timings.append(Timing("timings", "attention", 1e-5, floor_s, bound))
    results.left_out.append("driver: no time left")
    text = results.text()
    assert "kernels: 1 of 2 hold" in text and "WRONG b: off by 1" in text
    assert "runs to its end: RuntimeError: no room" in text
    assert "50%" in text and "memory" in text and "left out: driver" in text
    assert text.endswith("1 passed, 2 failed")
    told = json.loads(results.json())
    assert told["timings"][0]["share"] == pytest.approx(0.5) and len(told["checks"]) == 3


ODD_SECTIONS = """
import os, subprocess, sys, time
from gpu.results import Check, Timing

def fine(results, time_left):
    assert 0 < time_left() <= 30
    results.machine["GPU"] = "some"
    results.timings.append(Timing("fine", "t", 0.5, 0.25, "memory"))

def hangs(results, time_left):
    results.checks.append(Check("hangs", "first", True))
    time_left()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["CHILD"], "w").write(str(child.pid))
    time.sleep(600)

def dies(results, time_left):
    results.left_out.append("some of it")
    time_left()
    os._exit(3)

SECTIONS = {"fine": fine, "hangs": hangs, "dies": dies}
"""


def test_a_section_that_hangs_or_dies_is_ended_and_told_and_what_it_had_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_sections.py").write_text(ODD_SECTIONS)
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    results = Results()
    for name, seconds, grace_s in (("fine", 30, 30), ("hangs", 1, 5), ("dies", 30, 30)):
        bounded(results, name, seconds=seconds, grace_s=grace_s, module="odd_sections")
    assert results.timings == [Timing("fine", "t", 0.5, 0.25, "memory")] and results.machine == {
        "GPU": "some"
    }
    found = [(check.section, check.name, check.passed) for check in results.checks]
    assert found[:2] == [("hangs", "first", True), ("hangs", "ends in time", False)]
    assert found[2:] == [("dies", "runs to its end", False)] and "status 3" in results.checks[2].detail
    assert results.left_out == ["some of it"] and results.seconds["hangs"] < 10
    pid = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_run_gives_no_section_more_than_is_left_and_tells_what_it_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, float]] = []

    def take(results: Results, name: str, *, seconds: float, **bounds: object) -> None:
        assert bounds == {"grace_s": 20.0, "module": "gpu.sections"}
        asked.append((name, seconds))
        results.checks.append(Check(name, "a", name != "timings"))

    monkeypatch.setattr(check, "_why_not", lambda: None)
    monkeypatch.setattr(check, "_machine", dict)
    monkeypatch.setattr(check, "bounded", take)
    file = tmp_path / "new" / "gpu.json"
    words = ["--json", str(file), "--minutes", "1"]
    assert check.main([*words, "--only", "kernels,driver"]) == 0
    assert [name for name, _ in asked] == ["kernels", "driver"]
    assert asked[0][1] == pytest.approx(15, abs=1) and asked[1][1] == pytest.approx(30, abs=1)
    assert "left out: timings: not asked for" in capsys.readouterr().out
    assert check.main([*words, "--only", "timings"]) == 1 and json.loads(file.read_text())["left_out"]
    assert check.main([*words[:3], "0.5"]) == 1  # nothing was looked at
    assert "kernels: no time left" in capsys.readouterr().out


def test_what_the_gpu_is_asked_for_runs_and_holds_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_target(tmp_path / "target", max_context_len=512)
    write_good_drafter(tmp_path / "drafter", tmp_path / "target", noise=0.1)
    for name, value in (
        ("_DEVICE", "cpu"),
        ("_MODEL", tmp_path / "target"),
        ("_DRAFTER", tmp_path / "drafter"),
    ):
        monkeypatch.setattr(sections, name, value)
    results = Results(machine={})
    sections.executor(results, lambda: 100.0)
    sections.serving(results, lambda: 100.0)
    sections.scheduled(results, lambda: 100.0)
    sections._served(results, tmp_path, executor="torch")
    assert not [check for check in results.checks if not check.passed], results.text()
    assert len(results.checks) == 3 * 4 + 1 + 2 * 3 + 3 * 4 and len(results.timings) == 3 + 2 + 2 * 2 + 3
    assert not results.left_out
