"""What a load test tells: a report, a table, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark_client.load_plan import Cell, Load, Mode
from dspark_client.terminal import table

__all__ = ["draw", "report_of", "table_of"]


def report_of(
    modes: Sequence[Mode],
    loads: Sequence[Load],
    cells: dict[tuple[str, str], Cell],
    *,
    max_tokens: int,
    rounds: int,
) -> dict[str, Any]:
    """Return everything that was measured, as it is written to the JSON file."""
    results = [
        {
            "mode": mode.name,
            "load": load.name,
            "median": cells[mode.name, load.name].median(),
            "rounds": cells[mode.name, load.name].rounds,
            "errors": cells[mode.name, load.name].errors,
        }
        for load in loads
        for mode in modes
    ]
    return {"format": 1, "max_tokens": max_tokens, "num_rounds": rounds, "results": results}


def table_of(report: dict[str, Any]) -> str:
    """Return the medians as a table."""
    header = ("load", "mode", "tokens/s", "per user", "TTFT p50", "p95", "per token p50", "p99")
    rows = []
    for entry in report["results"]:
        figures = entry["median"]
        if not figures:
            rows.append((entry["load"], entry["mode"], *["failed"] * 6))
            continue
        rows.append(
            (
                entry["load"],
                entry["mode"],
                f"{figures['tokens_per_second']:.1f}",
                f"{figures['tokens_per_second_per_user']:.1f}",
                f"{figures['ttft_p50_s'] * 1e3:.0f} ms",
                f"{figures['ttft_p95_s'] * 1e3:.0f} ms",
                f"{figures['itl_p50_s'] * 1e3:.1f} ms",
                f"{figures['itl_p99_s'] * 1e3:.1f} ms",
            )
        )
    return table(header, rows)


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw throughput against per-user speed, and the time to the first token; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for mode in dict.fromkeys(entry["mode"] for entry in report["results"]):
        entries = [one for one in report["results"] if one["mode"] == mode and one["median"]]
        if not entries:
            continue
        speed = [one["median"]["tokens_per_second_per_user"] for one in entries]
        total = [one["median"]["tokens_per_second"] for one in entries]
        (points,) = left.plot(speed, total, "o", label=mode)
        users = [
            k for k, one in enumerate(entries) if "user" in one["load"]
        ]  # a curve; the others are points
        left.plot([speed[k] for k in users], [total[k] for k in users], color=points.get_color())
        for one, x, y in zip(entries, speed, total, strict=True):
            left.annotate(one["load"], (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        right.plot(
            [one["load"] for one in entries],
            [one["median"]["ttft_p50_s"] * 1e3 for one in entries],
            "o",
            label=mode,
        )
    left.set(xlabel="tokens/s of one user", ylabel="tokens/s of all", title="Throughput against speed")
    right.set(ylabel="ms, median", title="Time to first token", yscale="log")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[1]:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
