"""The capacity simulator: the published shape, its files and its refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from dspark.errors import ConfigError
from dspark.scheduling.cost_model import CapacityFile
from dspark.scheduling.simulate import EXAMPLES, add_simulate_arguments, run_simulate
from dspark.scheduling.simulation import RunResult, simulate
from dspark.scheduling.traffic import arrivals_of, load_acceptance
from dspark_client.cli import main
from dspark_client.simulate import CommandUnavailableError, add_simulate_command

CURVES = Path(__file__).parents[2] / "python_backend/dspark/scheduling/curves"


def run(
    policy: str, load: str, *, curve: str = "gpu", steps: int = 250, acceptance: Path | None = None
) -> RunResult:
    traffic = load_acceptance(acceptance or CURVES / "mixed.json")
    requests, closed = arrivals_of(load, traffic, seed=0)
    return simulate(
        policy=policy,
        arrivals=load,
        requests=requests,
        closed=closed,
        curve=CapacityFile.load(CURVES / f"{curve}.json").curve,
        acceptance=traffic,
        num_steps=steps,
        max_batch_size=512,
        max_step_tokens=4096,
    )


def test_the_published_shape_comes_out() -> None:
    """Long fixed drafts fall below no speculation at 256 requests; the scheduled ones stay above both everywhere."""
    for load in ("closed:1", "closed:64", "closed:256"):
        none, fixed, auto = (run(policy, load).tokens_per_second for policy in ("none", "fixed:7", "auto"))
        assert auto > 0.97 * max(none, fixed)
        if load == "closed:256":
            assert fixed < 0.9 * none
    assert run("auto", "closed:1").tokens_per_second > 4 * run("none", "closed:1").tokens_per_second


def test_the_verified_length_shrinks_with_load() -> None:
    lengths = [run("auto", f"closed:{n}").mean_verify_len for n in (1, 32, 256)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 6 > 2 > lengths[-1]


def test_the_cost_model_and_the_calibration_hold_while_serving() -> None:
    result = run("auto", "closed:16", curve="cpu", steps=800)
    assert result.cost_model_error < 0.10
    assert result.calibration_ece < 0.06
    assert result.num_finished > 5


def test_a_run_in_which_no_request_ends_still_tells_what_a_user_gets() -> None:
    result = run("none", "closed:1", curve="cpu", steps=60)
    assert result.num_finished == 0
    assert result.user_tokens_per_second == pytest.approx(result.tokens_per_second, rel=0.05)


def test_loads_are_all_checked_before_the_first_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "--arrivals", "closed:1", "often", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and "arrivals: got 'often', allowed is closed:N" in err
    assert not (tmp_path / "out").exists()


def test_an_open_load_is_served_as_it_comes() -> None:
    slow, fast = (run("auto", f"poisson:{rate}", curve="cpu", steps=600) for rate in (0.5, 4.0))
    assert fast.mean_running > slow.mean_running
    assert slow.tokens_per_second < fast.tokens_per_second
    assert slow.first_token_s < 1.0


def test_the_same_seed_gives_the_same_run() -> None:
    assert run("auto", "closed:8", steps=120) == run("auto", "closed:8", steps=120)


def test_recorded_blocks_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "blocks.json"
    blocks = [{"logits": [3.0, 2.0], "accepted": 2}, {"logits": [1.0, -1.0], "accepted": 0}]
    path.write_text(json.dumps({"block_size": 2, "blocks": blocks}))
    result = run("fixed:2", "closed:4", steps=400, acceptance=path)
    assert result.accepted_len == pytest.approx(2.0, abs=0.1)


def test_arrival_times_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.txt"
    path.write_text("0.0\n0.5\n0.1\n")
    requests, closed = arrivals_of(str(path), load_acceptance(CURVES / "mixed.json"), seed=0)
    assert closed is None
    assert [r.time_s for r in requests] == [0.0, 0.1, 0.5]


@pytest.mark.parametrize(
    "text", ["closed:0", "closed:x", "closed", "poisson:0", "poisson:nan", "poisson:-1", "no/file"]
)
def test_unusable_arrivals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="arrivals: got .* allowed is closed:N"):
        arrivals_of(text, load_acceptance(CURVES / "mixed.json"), seed=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"block_size": 0, "kinds": [{"name": "a"}]}, "block_size: got 0"),
        ({"block_size": 2, "kinds": []}, "kinds"),
        ({"block_size": 2, "kinds": [{"name": "a", "spread": -1.0}]}, "spread of 'a': got -1.0"),
        ({"block_size": 2, "kinds": [{"name": "a", "mean": float("nan")}]}, "mean of 'a': got nan"),
        ({"block_size": 2, "kinds": [{"name": "a", "output_len": 0}]}, "output_len of 'a': got 0"),
        ({"block_size": 2, "kinds": [{"name": "a", "speed": 1}]}, "speed"),
        ({"block_size": 2, "blocks": [{"logits": [1.0], "accepted": 0}]}, "blocks"),
        ({"block_size": 2, "blocks": [{"logits": [1.0, 1.0], "accepted": 3}]}, "accepted"),
        ({}, "block_size"),
    ],
)
def test_an_unusable_acceptance_file_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "acceptance.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_acceptance(path)


def test_the_command_writes_numbers_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_simulate_arguments(parser)
    options = "--capacity cpu --arrivals closed:2 closed:8 --policies none,auto --steps 60"
    args = parser.parse_args([*options.split(), "--out", str(tmp_path)])
    assert run_simulate(args) == 0
    runs = json.loads((tmp_path / "simulate.json").read_text())["runs"]
    assert [(r["arrivals"], r["policy"]) for r in runs] == [
        ("closed:2", "none"),
        ("closed:2", "auto"),
        ("closed:8", "none"),
        ("closed:8", "auto"),
    ]
    for name in ("throughput.png", "verify_len.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert "closed:8" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="policy: got 'fast'"):
        run_simulate(parser.parse_args(["--policies", "fast", "--out", str(tmp_path)]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_curves_are_measured_curves_that_say_where_they_come_from(name: str) -> None:
    path = CURVES / f"{name}.json"
    CapacityFile.load(path)
    assert len(json.loads(path.read_text())["note"]) > 100


def test_without_the_server_side_the_client_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_client.simulate.entry_points", lambda **_: ())
    with pytest.raises(CommandUnavailableError, match="not installed here"):
        add_simulate_command(argparse.ArgumentParser())


def test_the_client_simulates_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "simulate --capacity gpu --arrivals closed:2 --policies auto --steps 40 --out"
    assert main([*options.split(), str(tmp_path)]) == 0
    assert (tmp_path / "simulate.json").is_file()
    capsys.readouterr()
    assert main([*options.split(), str(tmp_path), "--capacity", "nowhere.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dspark-client simulate: nowhere.json: not a capacity file")


def test_the_client_without_the_server_side_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dspark_client.simulate.entry_points", lambda **_: ())
    assert main(["simulate", "--capacity", "gpu"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "not installed here" in line
