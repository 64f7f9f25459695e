"""What a load test works out of perf_analyzer's traces, and what it says when a load fails."""

import json

import pytest
from dspark_client.cli import main
from dspark_client.load import figures_of, load_test
from dspark_client.load_plan import Load, Mode, parse_loads, parse_modes
from dspark_client.perf_analyzer import LoadFailedError, PerfAnalyzer, Trace, _reason, _traces


def test_figures_of_two_users_worked_by_hand():
    figures = figures_of(
        [
            Trace(10.0, (10.5, 11.0, 12.0), (1, 2, 2)),  # 4 tokens in 1.5 s after the first
            Trace(10.5, (10.7, 11.7), (1, 1)),
        ]
    )
    assert figures["num_requests"] == 2 and figures["num_tokens"] == 7
    assert figures["tokens_per_second"] == pytest.approx(7 / 2.0)
    assert figures["ttft_p50_s"] == pytest.approx((0.5 + 0.2) / 2)
    assert figures["tokens_per_second_per_user"] == pytest.approx((4 / 1.5 + 1.0) / 2)
    # Gaps by token: 0.25 0.25 0.5 0.5 1.0
    assert figures["itl_p50_s"] == pytest.approx(0.5)
    assert figures["e2e_p50_s"] == pytest.approx((2.0 + 1.2) / 2)


def test_answers_of_one_response_have_figures_too():
    figures = figures_of([Trace(0.0, (1.0,), (5,))])
    assert figures["tokens_per_second"] == 5 and figures["tokens_per_second_per_user"] == 0


def test_the_export_is_read_and_its_noise_left_out():
    request = {
        "timestamp": 1_000_000_000,
        "response_timestamps": [2_000_000_000, 3_000_000_000, 4_000_000_000],
        "response_outputs": [
            {"num_output_tokens": 2},
            {"num_output_tokens": 1},
            {"num_output_tokens": 1 << 30},
        ],
    }
    nothing = {"timestamp": 1, "response_timestamps": [2], "response_outputs": [{}]}
    (trace,) = _traces({"experiments": [{"requests": [request, nothing]}]})
    assert trace == Trace(1.0, (2.0, 3.0), (2, 1))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "x\nThread 0: [UNAVAILABLE] the queue is full: 3 wait\nmore",
            "[UNAVAILABLE] the queue is full: 3 wait",
        ),
        ("Error: too few\nUsage:\n will exit with error\n", "Error: too few"),
        ("starting\nerror: Failed to connect\n", "error: Failed to connect"),
        ("", "perf_analyzer ended with status 99"),
    ],
)
def test_the_reason_of_a_failure_is_the_servers_where_there_is_one(output, reason):
    assert _reason(output, 99) == reason


def test_modes_and_loads_as_they_are_written():
    modes = parse_modes(["plain", "scheduled", "fixed=127.0.0.1:8011"], "127.0.0.1:8001")
    assert modes == [
        Mode("plain", "127.0.0.1:8001", 0), Mode("scheduled", "127.0.0.1:8001"), Mode("fixed", "127.0.0.1:8011"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'fixed'"):
        parse_modes(["fixed"], "x")
    one, two, three = parse_loads(concurrencies=[16], rates=[2.5], bursts=[(3, 2.0)], requests_per_user=4)
    assert one.num_requests == 64 and one.options == ("--concurrency-range", "16")
    assert "poisson" in two.options and two.num_requests == 16
    assert three.intervals_us == (1, 1, 2_000_000) and three.name == "3 every 2 s"


class Analyzer:
    """Answers every second load with an error."""

    calls = 0

    def run(self, _url, _model, inputs, _load, *, timeout_s):
        assert timeout_s > 0 and all(entry["return_num_output_tokens"] is True for entry in inputs)
        Analyzer.calls += 1
        if Analyzer.calls % 2:
            raise LoadFailedError("[UNAVAILABLE] the queue is full")
        return [Trace(0.0, (1.0, 2.0), (1, 1))]


def test_a_load_that_fails_is_reported_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("dspark_client.load.PerfAnalyzer", Analyzer)
    Analyzer.calls = 0
    out, said = tmp_path / "sub" / "load.json", []
    status = load_test(
        [Mode("plain", "x", 0), Mode("scheduled", "x")],
        [Load("a", (), 8), Load("b", (), 8, (1, 5))],
        model="m",
        prompts=["p"],
        max_tokens=2,
        rounds=1,
        out=out,
        traces=tmp_path / "traces.json",
        say=said.append,
    )
    told = json.loads((tmp_path / "traces.json").read_text())
    request = {"sent_s": 0.0, "response_s": [1.0, 2.0], "num_tokens": [1, 1]}
    assert told == [{"mode": "scheduled", "load": load, "requests": [request]} for load in "ab"]
    assert status == 1 and Analyzer.calls == 4
    report = json.loads(out.read_text())
    assert [bool(entry["errors"]) for entry in report["results"]] == [True, False, True, False]
    assert report["results"][1]["median"]["tokens_per_second"] == 1.0
    shown = capsys.readouterr()
    assert shown.out.count("failed") == 12 and shown.err.count("the queue is full") == 2
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert said[0] == "[0/4] plain, a"


@pytest.mark.parametrize("burst", ["8", "0:1", "x:1", "8:0", "8:x"])
def test_a_burst_that_cannot_be_read_is_refused(burst, capsys):
    with pytest.raises(SystemExit):
        main(["load", "--burst", burst])
    assert "N:SECONDS" in capsys.readouterr().err


def test_a_program_that_falls_is_run_once_more(tmp_path):
    """perf_analyzer 2.51 falls now and then, and leaves an empty export behind."""
    program = tmp_path / "perf_analyzer"
    request = {
        "timestamp": 10**9,
        "response_timestamps": [2 * 10**9],
        "response_outputs": [{"num_output_tokens": 3}],
    }
    (tmp_path / "good").write_text(json.dumps({"experiments": [{"requests": [request]}]}))
    program.write_text(
        f"""#!/bin/sh
while [ "$1" != --profile-export-file ]; do shift; done
if [ -e {tmp_path}/fallen ]; then cp {tmp_path}/good "$2"; exit 0; fi
touch {tmp_path}/fallen; : > "$2"; kill -SEGV $$
"""
    )
    program.chmod(0o755)
    analyzer = PerfAnalyzer.__new__(PerfAnalyzer)
    analyzer._program = str(program)
    traces = analyzer.run("host:1", "dspark", [{"text_input": "x"}], [], timeout_s=60)
    assert traces == [Trace(1.0, (2.0,), (3,))] and (tmp_path / "fallen").exists()
