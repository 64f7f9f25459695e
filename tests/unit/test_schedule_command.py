"""`dspark schedule`: the contract for scripts."""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

import pytest
from dspark.errors import DSparkError
from dspark.scheduling.command import add_schedule_arguments, run_schedule, schedule

QUESTION: dict[str, Any] = {
    "confidence": [[0.8, 0.9], [0.5, 0.1]],
    "steps_per_second": {"1": 1.0, "2": 0.9, "6": 0.5},
    "policy": "prefix",
    "caps": None,
    "prefill_tokens": 0,
    "budget": None,
}


def answer(**change: Any) -> tuple[list[int], float]:
    out = schedule({**QUESTION, **change})
    assert sorted(out) == ["expected_throughput", "verify_len"]
    return out["verify_len"], out["expected_throughput"]


def test_the_command_reads_json_and_writes_json() -> None:
    parser = argparse.ArgumentParser()
    add_schedule_arguments(parser)
    out = io.StringIO()
    assert run_schedule(parser.parse_args([]), io.StringIO(json.dumps(QUESTION)), out) == 0
    assert json.loads(out.getvalue()) == schedule(QUESTION)


def test_every_policy_answers() -> None:
    rate = 1 / (1 / 0.9 + (1 / 0.5 - 1 / 0.9) / 2)  # 4 tokens, half way from 2 to 6 in time
    assert answer(policy="none") == ([0, 0], pytest.approx(2 * 0.9))
    assert answer(policy="fixed:1") == ([1, 1], pytest.approx(3.3 * rate))
    assert answer(policy="threshold:0.5") == (
        [2, 1],
        pytest.approx((2 + 0.8 + 0.72 + 0.5) / (1 / rate + (1 / rate - 1 / 0.9) / 2)),
    )
    assert answer(policy="prefix") == ([2, 0], pytest.approx(3.52 * rate))
    assert answer(policy="auto")[0] == [2, 0]
    assert answer(policy="lagged", budget=3)[0] == [2, 1]
    assert answer(policy="lagged", budget=99)[0] == [2, 2]


def test_the_counterexample_of_the_algorithm() -> None:
    curve = {"1": 1.0, "2": 0.5, "3": 0.45}
    for second in (0.9, 0.0):
        assert answer(confidence=[[0.8, second]], steps_per_second=curve) == ([0], pytest.approx(1.0))


def test_caps_and_prefill_count() -> None:
    assert answer(caps=[1, 5])[0] == [1, 1]
    assert answer(caps=[0, 0])[0] == [0, 0]
    knee = {"1": 1.0, "12": 0.98, "40": 0.05}  # a dozen tokens are nearly free, more are dear
    totals = [
        sum(answer(steps_per_second=knee, prefill_tokens=p, confidence=[[0.9] * 6] * 3)[0]) for p in (0, 5, 9)
    ]
    assert totals == [9, 4, 0]


def test_rows_may_have_different_lengths() -> None:
    assert answer(confidence=[[0.9], [], [0.9, 0.9, 0.9]], policy="fixed:2")[0] == [1, 0, 2]


def test_only_sizes_that_are_needed_must_be_listed() -> None:
    assert answer(confidence=[[0.1] * 9], steps_per_second={"1": 1.0, "2": 0.5})[0] == [0]
    with pytest.raises(DSparkError, match="steps_per_second: got 3"):
        answer(confidence=[[0.9] * 9], steps_per_second={"1": 1.0, "2": 0.9})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"confidence": []}, "confidence"),
        ({"confidence": None}, "confidence"),
        ({"confidence": [0.5]}, "confidence"),
        ({"confidence": [[1.01]]}, "confidence[0][0]"),
        ({"confidence": [[0.5], [0.5, -0.1]]}, "confidence[1][1]"),
        ({"confidence": [[float("nan")]]}, "confidence[0][0]"),
        ({"confidence": [["0.5"]]}, "confidence[0][0]"),
        ({"confidence": [[True]]}, "confidence[0][0]"),
        ({"confidence": [[0.5, 0.5]], "block_size": 1}, "confidence[0]"),
        ({"steps_per_second": {}}, "steps_per_second"),
        ({"steps_per_second": None}, "steps_per_second"),
        ({"steps_per_second": {"1": 1.0, "2": -1.0}}, "steps_per_second[2]"),
        ({"steps_per_second": {"1": 1.0, "2": 0}}, "steps_per_second[2]"),
        ({"steps_per_second": {"1": float("inf")}}, "steps_per_second[1]"),
        ({"steps_per_second": {"1": 10**400}}, "steps_per_second[1]"),
        ({"steps_per_second": {"a": 1.0}}, "steps_per_second"),
        ({"steps_per_second": {"0": 1.0}}, "steps_per_second"),
        ({"steps_per_second": {"1": 1.0}}, "steps_per_second"),
        ({"steps_per_second": {"3": 1.0, "9": 0.5}}, "steps_per_second"),
        ({"policy": "fastest"}, "policy"),
        ({"policy": 3}, "policy"),
        ({"policy": "lagged"}, "budget"),
        ({"policy": "lagged", "budget": -1}, "budget"),
        ({"budget": 3}, "budget"),
        ({"caps": [1]}, "caps"),
        ({"caps": [1, -1]}, "caps[1]"),
        ({"caps": [1, 1.5]}, "caps[1]"),
        ({"prefill_tokens": -1}, "prefill_tokens"),
        ({"prefill_tokens": None}, "prefill_tokens"),
        ({"speed": 1}, "speed"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(DSparkError) as error:
        schedule({**QUESTION, **change})
    assert str(error.value).startswith(f"{name}: got ")


@pytest.mark.parametrize("text", ["", "[", "[1]", "3", "[" * 100_000])
def test_what_is_not_one_json_object_is_refused(text: str) -> None:
    with pytest.raises(DSparkError, match="standard input"):
        run_schedule(argparse.Namespace(pretty=False), io.StringIO(text), io.StringIO())
