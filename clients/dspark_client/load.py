"""`dspark-client load`: throughput and latency under load, driven by perf_analyzer.

All modes are measured at every load in turn, and that as often as `--rounds` says, so that what else the
machine does falls on all of them alike. A load that fails is reported as such, and the rest goes on.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from dspark_client.load_plan import Cell, Load, Mode
from dspark_client.load_report import draw, report_of, table_of
from dspark_client.perf_analyzer import LoadFailedError, PerfAnalyzer, Trace

__all__ = ["PROMPTS", "figures_of", "load_test"]

PROMPTS = (
    "The capital of France is",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "def quicksort(items):\n    ",
    "Repeat after me: one two three four five. one two three four five. one two three",
    "Explain in simple words why the sky is blue and sunsets are red.",
    "List the planets of the solar system with one sentence for each of them:\n1.",
    "Translate to French: I would like a cup of coffee and a piece of cake, please.",
    "Copy this text and correct its errors: The quick brwon fox jumps ovr the lazy dog. The quick",
)


def figures_of(traces: Sequence[Trace]) -> dict[str, float]:
    """Return what a load's traces say; seconds, and tokens per second.

    The time between two tokens is the time between two responses over the tokens of the later one. A user's
    speed counts from the first response on.
    """
    first = np.array([trace.response_s[0] - trace.sent_s for trace in traces])
    gaps = [
        np.repeat((b - a) / count, count)
        for trace in traces
        for a, b, count in zip(trace.response_s, trace.response_s[1:], trace.num_tokens[1:], strict=False)
    ]
    between = np.concatenate(gaps) if gaps else np.zeros(1)
    speeds = [
        sum(trace.num_tokens[1:]) / (trace.response_s[-1] - trace.response_s[0])
        for trace in traces
        if len(trace.response_s) > 1
    ]
    tokens = sum(sum(trace.num_tokens) for trace in traces)
    span_s = max(trace.response_s[-1] for trace in traces) - min(trace.sent_s for trace in traces)
    figures = {
        "num_requests": float(len(traces)),
        "num_tokens": float(tokens),
        "tokens_per_second": tokens / span_s,
        "tokens_per_second_per_user": float(np.median(speeds)) if speeds else 0.0,
        "e2e_p50_s": float(np.median([trace.response_s[-1] - trace.sent_s for trace in traces])),
    }
    for name, values in (("ttft", first), ("itl", between)):
        for percent in (50, 95, 99):
            figures[f"{name}_p{percent}_s"] = float(np.percentile(values, percent))
    return figures


def load_test(
    modes: Sequence[Mode],
    loads: Sequence[Load],
    *,
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    rounds: int,
    out: Path,
    traces: Path | None = None,
    timeout_s: float = 600.0,
    say: Callable[[str], None],
) -> int:
    """Measure every mode under every load; print a table, write JSON and a picture.

    Arguments:
        traces: gets every request of every round, for figures of the reader's own; None = nothing.

    Returns:
        0, or 1 when a load failed.

    Raises:
        LoadFailedError: perf_analyzer is not there.
    """
    analyzer = PerfAnalyzer()
    cells: dict[tuple[str, str], Cell] = {(mode.name, load.name): Cell() for mode in modes for load in loads}
    done, total = 0, rounds * len(cells)
    started_s = time.monotonic()
    for turn in range(rounds):
        for load in loads:
            # Whoever comes first in one round comes last in the next.
            for mode in modes if turn % 2 == 0 else reversed(modes):
                say(f"[{done}/{total}] {mode.name}, {load.name}")
                _measure(
                    analyzer, mode, load, cells[mode.name, load.name], model, prompts, max_tokens, timeout_s
                )
                done += 1
    say(f"[{done}/{total}] done in {time.monotonic() - started_s:.0f} s")
    report = report_of(modes, loads, cells, max_tokens=max_tokens, rounds=rounds)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(table_of(report))
    say(f"figures: {out}")
    if traces is not None:
        traces.write_text(json.dumps(_rounds(cells)) + "\n")
        say(f"requests: {traces}")
    picture = out.with_suffix(".png")
    if draw(report, picture):
        say(f"picture: {picture}")
    for entry in report["results"]:
        for error in entry["errors"]:
            print(f"error: {entry['mode']}, {entry['load']}: {error}", file=sys.stderr)
    return 1 if any(entry["errors"] for entry in report["results"]) else 0


def _rounds(cells: Mapping[tuple[str, str], Cell]) -> list[dict[str, object]]:
    """Return every measured round with its requests; times in seconds on perf_analyzer's clock."""
    return [
        {"mode": mode, "load": load, "requests": [asdict(trace) for trace in round_traces]}
        for (mode, load), cell in cells.items()
        for round_traces in cell.traces
    ]


def _measure(
    analyzer: PerfAnalyzer,
    mode: Mode,
    load: Load,
    cell: Cell,
    model: str,
    prompts: Sequence[str],
    max_tokens: int,
    timeout_s: float,
) -> None:
    fields: dict[str, object] = {
        "max_tokens": max_tokens,
        "stream": True,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_num_output_tokens": True,
    }
    if mode.num_draft_tokens is not None:
        fields["num_draft_tokens"] = mode.num_draft_tokens
    options = [*load.options, "--request-count", str(load.num_requests)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as schedule:
        if load.intervals_us:
            schedule.write("\n".join(map(str, load.intervals_us)) + "\n")
            schedule.flush()
            options += ["--request-intervals", schedule.name]
        try:
            inputs = [{"text_input": prompt, **fields} for prompt in prompts]
            traces = analyzer.run(mode.url, model, inputs, options, timeout_s=timeout_s)
        except LoadFailedError as error:
            cell.errors.append(str(error))
            return
    cell.rounds.append(figures_of(traces))
    cell.traces.append(traces)
