"""What `bench` prints: one line a figure, with what is wanted of it and whether that holds on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Line", "median", "spread", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure. `at_most` and `at_least` say what is wanted, in the figure's own unit; neither = told only."""

    name: str
    value: float
    unit: str
    how: str = ""  # what it was computed from
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the figure is as wanted; None where nothing is."""
        if self.at_least is not None:
            return self.value >= self.at_least
        if self.at_most is not None:
            return self.value <= self.at_most
        return None

    @property
    def wanted(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return ""

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "how": self.how,
            "wanted": self.wanted or None,
            "holds": self.holds,
        }


def table(lines: Sequence[Line]) -> str:
    """Return the lines as an aligned text table."""
    rows = [("what", "figure", "wanted", "holds", "from")]
    marks = {True: "yes", False: "NO", None: ""}
    for line in lines:
        digits = 2 if line.value < 100 else 1
        figure = f"{line.value:.{digits}f} {line.unit}"
        rows.append((line.name, figure, line.wanted, marks[line.holds], line.how))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    )


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return float(statistics.median(values))


def spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as text."""
    return f"{min(values):.2f} to {max(values):.2f}"
