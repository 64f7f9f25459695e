"""`dspark schedule`: what a policy would verify, from JSON on standard input, to JSON on standard output.

    {"confidence": [[c_1..c_G], ...], "steps_per_second": {"1": 1.0, "2": 0.5, ...}, "policy": "prefix",
     "caps": [..] or null, "prefill_tokens": 0, "budget": K or null}

    {"verify_len": [...], "expected_throughput": x}

The cost curve is taken as given, drafting costs nothing, and nothing is learned. Between listed sizes the
time of a step is interpolated; a size that could be needed but lies outside of them is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, TextIO

import numpy as np

from dspark.errors import RequestError
from dspark.scheduling.allocation import (
    Candidates,
    early_stop_num,
    lookahead_num,
    rank_candidates,
    survival_of,
    throughput,
    verify_len_of,
)
from dspark.scheduling.interface import Float64, Int32
from dspark.scheduling.policy import fixed_verify_len, parse_policy, threshold_verify_len

__all__ = ["add_schedule_arguments", "run_schedule", "schedule"]

_FIELDS = frozenset(
    {"confidence", "steps_per_second", "policy", "caps", "prefill_tokens", "budget", "block_size"}
)


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pretty", action="store_true", help="indent the answer")


def run_schedule(args: argparse.Namespace, stdin: TextIO, stdout: TextIO) -> int:
    """Answer one question.

    Raises:
        DSparkError: naming the field, the value and what is allowed.
    """
    text = stdin.read()
    try:
        question = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("standard input", text, f"one JSON object ({error})") from error
    answer = schedule(question)
    json.dump(answer, stdout, indent=1 if getattr(args, "pretty", False) else None)
    stdout.write("\n")
    return 0


def schedule(question: object) -> dict[str, Any]:
    """Return the answer of the command for its decoded question.

    Raises:
        DSparkError: naming the field, the value and what is allowed.
    """
    if not isinstance(question, dict):
        raise RequestError("standard input", question, "one JSON object")
    unknown = sorted(question.keys() - _FIELDS)
    if unknown:
        fields = ", ".join(sorted(_FIELDS))
        raise RequestError(unknown[0], question[unknown[0]], f"no such field; fields are {fields}")
    confidence, num_drafts = _confidence(question.get("confidence"), question.get("block_size"))
    num_sequences, block_size = confidence.shape
    text = question.get("policy", "prefix")
    if not isinstance(text, str):
        raise RequestError("policy", text, "the name of a policy")
    policy = parse_policy(text, block_size=block_size)
    num_drafts = np.minimum(num_drafts, _caps(question.get("caps"), num_sequences))
    prefill_tokens = _whole("prefill_tokens", question.get("prefill_tokens", 0))
    budget = None if question.get("budget") is None else _whole("budget", question["budget"])
    if policy.name == "lagged" and budget is None:
        raise RequestError("budget", None, "a whole number >= 0: lagged takes it from an earlier step")
    if policy.name != "lagged" and budget is not None:
        raise RequestError("budget", budget, f"null: only the policy lagged takes one, not {text!r}")

    survival = survival_of(confidence, num_drafts)
    candidates = rank_candidates(survival)
    first = num_sequences + prefill_tokens
    match policy.name:
        case "none":
            verify_len = np.zeros(num_sequences, np.int32)
        case "fixed":
            verify_len = fixed_verify_len(num_drafts=num_drafts, k=policy.num_drafts)
        case "threshold":
            verify_len = threshold_verify_len(
                confidence=confidence, num_drafts=num_drafts, min_confidence=policy.min_confidence
            )
        case "lagged":
            num = min(budget or 0, len(candidates.survival))
            verify_len = verify_len_of(candidates, num, num_sequences=num_sequences)
        case _:
            # Early stop looks no farther than it gets: only a size that is really needed must be listed.
            points = _points(question.get("steps_per_second"))
            covered = max(min(int(num_drafts.sum()) + 1, max(points) - first + 1), 1)
            seconds = _seconds(points, first, covered)
            at_hand = Candidates(candidates.survival[: covered - 1], candidates.sequence[: covered - 1])
            theta = throughput(at_hand, num_sequences=num_sequences, seconds=seconds)
            num = early_stop_num(theta)
            if policy.name == "auto":
                num = lookahead_num(
                    at_hand,
                    theta,
                    num_sequences=num_sequences,
                    seconds=seconds,
                    decay=0.8,
                    max_ahead=max(block_size, num_sequences),
                )
            if num == len(at_hand.survival) < len(candidates.survival):
                _seconds(points, first, num + 2)  # refused: the next size is not listed
            verify_len = verify_len_of(candidates, num, num_sequences=num_sequences)
    kept = np.arange(block_size) < verify_len[:, None]
    tokens = num_sequences + float(survival[kept].sum())
    seconds = _seconds(_points(question.get("steps_per_second")), first + int(verify_len.sum()), 1)
    return {"verify_len": verify_len.tolist(), "expected_throughput": tokens / float(seconds[0])}


def _confidence(rows: object, block_size: object) -> tuple[Float64, Int32]:
    """Return confidences [R, G] padded with 0, and how many each sequence has [R]."""
    allowed = "a non-empty list of lists of numbers in [0, 1]"
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise RequestError("confidence", rows, allowed)
    longest = max(len(row) for row in rows)
    size = longest if block_size is None else _whole("block_size", block_size)
    out = np.zeros((len(rows), size))
    for r, row in enumerate(rows):
        if len(row) > size:
            raise RequestError(f"confidence[{r}]", row, f"at most block_size ({size}) positions")
        for k, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
                raise RequestError(f"confidence[{r}][{k}]", value, "a number in [0, 1]")
        out[r, : len(row)] = row
    return out, np.array([len(row) for row in rows], np.int32)


def _caps(caps: object, num_sequences: int) -> Int32:
    if caps is None:
        return np.full(num_sequences, np.iinfo(np.int32).max, np.int32)
    if not isinstance(caps, list) or len(caps) != num_sequences:
        raise RequestError("caps", caps, f"null or {num_sequences} whole numbers >= 0, one per sequence")
    return np.minimum([_whole(f"caps[{r}]", cap) for r, cap in enumerate(caps)], 2**31 - 1).astype(np.int32)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RequestError(name, value, "a whole number >= 0")
    return value


def _points(curve: object) -> dict[int, float]:
    """Return seconds by tokens in the pass."""
    name = "steps_per_second"
    if not isinstance(curve, dict) or not curve:
        raise RequestError(name, curve, "a non-empty object: tokens in the pass -> steps per second")
    points: dict[int, float] = {}
    for key, rate in curve.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and 0 < int(key) < 2**31):
            raise RequestError(name, key, "sizes that are whole numbers > 0")
        real = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not real or not 1e-100 < rate < 1e100:
            raise RequestError(f"{name}[{key}]", rate, "a finite number > 0, from 1e-100 to 1e100")
        if int(key) in points:
            raise RequestError(name, key, "every size once")
        points[int(key)] = 1.0 / rate
    return points


def _seconds(points: dict[int, float], first: int, count: int) -> Float64:
    """Return the seconds of steps over first, first+1, ... tokens [count]."""
    sizes = sorted(points)
    last = first + count - 1
    if first < sizes[0] or last > sizes[-1]:
        raise RequestError(
            "steps_per_second",
            first if first < sizes[0] else last,
            f"a curve that covers {first} to {last} tokens; this one goes from {sizes[0]} to {sizes[-1]}",
        )
    return np.interp(np.arange(first, last + 1, dtype=np.float64), sizes, [points[b] for b in sizes])


if __name__ == "__main__":
    sys.exit(run_schedule(argparse.Namespace(pretty=False), sys.stdin, sys.stdout))
