"""The figures that are compared: in process and served, by the same rule."""

import contextlib
import subprocess

import pytest
from dspark_build import bench_served
from dspark_build.bench_served import Answer, Figures, figures_of, main, table_of


def test_only_the_time_counts_in_which_every_user_had_a_request_open():
    answers = [
        Answer(0.0, [2.0, 4.0], [1, 4]),  # the second user comes at 1.0; before that nothing counts
        Answer(1.0, [3.0, 5.0], [1, 4]),
        Answer(4.0, [5.0, 8.0], [1, 6]),  # the last to be sent at 5.0: from 8.0 on a user is missing
        Answer(5.0, [6.0, 10.0], [1, 8]),
    ]
    figures = figures_of(answers, users=2)
    # 1 to 8: all of the first three, and of the last its first token and half of the other eight.
    assert figures.tokens_per_s == pytest.approx((5 + 5 + 7 + 1 + 4) / 7.0)
    assert figures.first_token_s == pytest.approx(1.5)
    assert figures.token_s == pytest.approx(0.5)


def test_joining_outputs_changes_no_throughput():
    each = [Answer(0.0, [float(k) for k in range(1, 9)], [1] * 8), Answer(8.0, [9.0, 10.0], [1, 1])]
    joined = [Answer(0.0, [1.0, 8.0], [1, 7]), Answer(8.0, [9.0, 10.0], [1, 1])]
    assert figures_of(each, users=1).tokens_per_s == pytest.approx(figures_of(joined, users=1).tokens_per_s)


def test_the_table_compares_round_by_round_marks_what_misses_and_tells_failures():
    def figures(rate):
        return Figures(tokens_per_s=rate, first_token_s=0.01, token_s=0.005)

    held = [(figures(100.0), figures(95.0)), (figures(200.0), figures(188.0)), (figures(50.0), figures(50.0))]
    missed = [(figures(100.0), figures(91.0))]
    table = table_of({(1, "plain"): held, (4, "plain"): missed, (16, "plain"): []}).splitlines()
    assert table[2] == "| 1 | plain | 100 -> 95 | 0.950 (0.94, 0.95, 1.00) | 10.0 -> 10.0 | 5.00 -> 5.00 |"
    assert "**0.910**" in table[3] and "failed" in table[4]


def test_a_load_that_fails_leaves_its_round_out_and_the_others_go_on(monkeypatch, capsys):
    turns = []

    def served(_url, _prompts, _args, *, users, mode):
        turns.append((users, mode))
        if users == 4 or len(turns) == 3:
            raise subprocess.CalledProcessError(1, ["dspark-client"], stderr=b"first\nperf_analyzer fell\n")
        return Figures(tokens_per_s=9.5, first_token_s=0.1, token_s=0.1)

    class Server(contextlib.nullcontext):
        grpc_url = "127.0.0.1:1"

    monkeypatch.setattr(bench_served, "served", served)
    monkeypatch.setattr(bench_served, "ServerProcess", lambda _options: Server(Server()))
    monkeypatch.setattr(bench_served, "load_checked_config", lambda *_args, **_options: None)
    monkeypatch.setattr(bench_served, "load_runtime", lambda *_args, **_options: Runtime())
    here = Figures(tokens_per_s=10.0, first_token_s=0.1, token_s=0.1)
    monkeypatch.setattr(bench_served, "in_process", lambda *_args, **_options: here)
    assert main(["--concurrency", "1", "4", "--mode", "plain", "--starts", "2", "--rounds", "2"]) == 1
    out, err = capsys.readouterr()
    assert "0.950 (0.95, 0.95, 0.95)" in out and "| 4 | plain | failed" in out
    assert "1 users, plain: a round is left out: perf_analyzer fell" in err
    assert turns == ([(1, "plain")] * 3 + [(4, "plain")] * 3) * 2 and Runtime.closed == 2


class Runtime:
    """An engine that is only closed."""

    closed = 0

    @property
    def engine(self):
        return self

    def close(self):
        Runtime.closed += 1
