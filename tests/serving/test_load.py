"""`dspark-client load` with the real perf_analyzer against a real server."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from dspark_client.cli import main

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        shutil.which("perf_analyzer") is None
        and not Path(sys.executable).with_name("perf_analyzer").is_file(),
        reason="no perf_analyzer here",
    ),
]
LIMIT = ["--timeout", "120"]


def test_every_shape_of_load_is_measured_in_both_modes(server, tmp_path, capsys):
    out = tmp_path / "load.json"
    shape = [
        "--concurrency",
        "2",
        "--rate",
        "20",
        "--burst",
        "4:0.2",
        "--rounds",
        "1",
        "--requests-per-user",
        "1",
    ]
    status = main(["load", "--url", server.grpc_url, *shape, "--max-tokens", "12", *LIMIT, "--out", str(out)])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    report = json.loads(out.read_text())
    assert [(entry["mode"], entry["load"]) for entry in report["results"]] == [
        (mode, load) for load in ("2 users", "20/s", "4 every 0.2 s") for mode in ("plain", "scheduled")
    ]
    for entry in report["results"]:
        figures = entry["median"]
        assert figures["num_requests"] >= 8 and figures["num_tokens"] == 12 * figures["num_requests"]
        assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
        assert figures["tokens_per_second"] > 0
    assert "tokens/s" in shown.out and out.with_suffix(".png").is_file()


def test_a_server_that_refuses_is_reported(server, tmp_path, capsys):
    out = tmp_path / "load.json"
    shape = ["--mode", "plain", "--concurrency", "1", "--rounds", "1", "--max-tokens", "100000"]
    assert main(["load", "--url", server.grpc_url, *shape, *LIMIT, "--out", str(out)]) == 1
    assert "[INVALID_ARG] max_tokens: got 100000" in capsys.readouterr().err
