"""The curves of a training run: a CSV that grows, and a picture of it where matplotlib is there."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from dspark_build.files import write_text

__all__ = ["Curves"]


class Curves:
    """Rows of named numbers, one for each report.

    Arguments:
        path: the CSV; rows that are there are kept up to `step`, so that a resumed run does not tell a
            step twice.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        self._rows: list[dict[str, str]] = []
        if step and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                self._rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]

    def add(self, row: dict[str, float]) -> None:
        self._rows.append({name: f"{value:.6g}" for name, value in row.items()})

    def save(self) -> None:
        """Write the CSV and, where possible, the picture."""
        if not self._rows:
            return
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self._path, text.getvalue())
        self._draw()

    def _draw(self) -> None:
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            return
        panels = (
            ("loss", ["loss", "held_out_loss"]),
            ("accepted length", ["accepted_len", "held_out_accepted_len", "held_out_greedy_len"]),
            ("acceptance by position", [f"acceptance_{k}" for k in range(1, 17)]),
        )
        figure, axes = plt.subplots(1, 3, figsize=(15, 4), constrained_layout=True)
        for axis, (title, names) in zip(axes, panels, strict=True):
            for name in names:
                points = [(float(r["positions"]) / 1e6, float(r[name])) for r in self._rows if r.get(name)]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name.replace("_", " "))
            axis.set_title(title)
            axis.set_xlabel("million positions")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=8)
        figure.savefig(self._path.with_suffix(".png"), dpi=110)
        plt.close(figure)
