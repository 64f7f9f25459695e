"""What a run found: checks, timings, what was left out. Printed once, and written as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

__all__ = ["Check", "Results", "Timing"]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold."""

    section: str
    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one launch took, beside the least it could take."""

    section: str
    name: str
    seconds: float
    floor_s: float | None = None  # by this GPU's measured bandwidth and arithmetic
    bound: str = ""  # memory or arithmetic

    @property
    def share(self) -> float | None:
        """Reached share of what bounds it."""
        return None if self.floor_s is None or self.seconds <= 0 else self.floor_s / self.seconds


@dataclass(slots=True)
class Results:
    """Filled by the sections."""

    machine: dict[str, str | float] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # and why
    seconds: dict[str, float] = field(default_factory=dict)  # of each section

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.passed]

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section; an exception in it is a failed check, and the next section runs."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            self.checks.append(
                Check(name, "runs to its end", False, f"{type(error).__name__}: {error}"[:500])
            )
        finally:
            self.seconds[name] = round(time.perf_counter() - start, 2)

    def text(self) -> str:
        """Return the summary."""
        lines = ["", "machine"]
        lines += [f"  {name:<12} {value}" for name, value in self.machine.items()]
        for section in dict.fromkeys(check.section for check in self.checks):
            its = [check for check in self.checks if check.section == section]
            good = sum(check.passed for check in its)
            lines.append(f"{section}: {good} of {len(its)} hold, {self.seconds.get(section, 0.0):.1f} s")
            lines += [f"  WRONG {check.name}: {check.detail}" for check in its if not check.passed]
        if self.timings:
            lines.append(f"{'time of a launch':<58} {'us':>9} {'least':>9} {'share':>7}  bound by")
        for timing in self.timings:
            least = "" if timing.floor_s is None else f"{timing.floor_s * 1e6:9.1f}"
            share = "" if timing.share is None else f"{timing.share:7.0%}"
            lines.append(
                f"  {timing.name:<56} {timing.seconds * 1e6:9.1f} {least:>9} {share:>7}  {timing.bound}"
            )
        lines += [f"left out: {what}" for what in self.left_out]
        lines.append(f"{len(self.checks) - len(self.failed)} passed, {len(self.failed)} failed")
        return "\n".join(lines)

    def add(self, told: str) -> None:
        """Add what another process told as JSON, but for its seconds."""
        raw = json.loads(told)
        self.machine |= raw["machine"]
        self.checks += [Check(**check) for check in raw["checks"]]
        self.timings += [
            Timing(**{name: value for name, value in timing.items() if name != "share"})
            for timing in raw["timings"]
        ]
        self.left_out += raw["left_out"]

    def json(self) -> str:
        """Return everything."""
        timings = [asdict(timing) | {"share": timing.share} for timing in self.timings]
        return json.dumps(
            {
                "machine": self.machine,
                "seconds": self.seconds,
                "checks": [asdict(check) for check in self.checks],
                "timings": timings,
                "left_out": self.left_out,
            },
            indent=1,
        )
