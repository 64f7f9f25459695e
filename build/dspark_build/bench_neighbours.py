"""What other processes keep of the machine while a pass runs, and what the pass keeps: `bench_native --neighbours`.

One single-threaded process for each core counts as fast as it can: first without us, then beside a loaded model that
has nothing to do, then beside passes without a pause. A fair machine gives each side about half of it in the last case;
a model that waits by spinning would take more, and would take some of it while idle.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["NeighbourReport", "Neighbours", "measure_neighbours", "neighbour_lines"]

_COUNTING = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
for line in sys.stdin:
    end, count = time.perf_counter() + float(line), 0
    while time.perf_counter() < end:
        for _ in range(1000):
            count += 1
    print(count, flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourReport:
    """Counts and passes per second."""

    alone: float  # all neighbours together, nothing of ours in the process
    beside_idle: float
    beside_busy: float
    passes_alone: float
    passes_beside: float


class Neighbours:
    """One counting process on each core of this process; they wait on a pipe between their turns."""

    def __init__(self) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", _COUNTING, str(cpu)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for cpu in sorted(os.sched_getaffinity(0))
        ]

    def start(self, seconds: float) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()

    def counted(self) -> int:
        """Wait for all and return what they counted."""
        total = 0
        for process in self._processes:
            assert process.stdout is not None
            total += int(process.stdout.readline())
        return total

    def rate(self, seconds: float) -> float:
        self.start(seconds)
        return self.counted() / seconds

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()


def _passes(run: Callable[[], object], seconds: float) -> float:
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        run()
        count += 1
    return count / seconds


def measure_neighbours(load: Callable[[], Callable[[], object]], *, seconds: float) -> NeighbourReport:
    """Run every case for some seconds.

    Arguments:
        load: makes the model and returns one pass over it; called between the first case and the second.
        seconds: of each of the five cases.
    """
    neighbours = Neighbours()
    try:
        neighbours.rate(0.2)  # started and warm
        alone = neighbours.rate(seconds)
        run = load()
        run()
        beside_idle = neighbours.rate(seconds)
        passes_alone = _passes(run, seconds)
        neighbours.start(seconds)
        passes_beside = _passes(run, seconds)
        beside_busy = neighbours.counted() / seconds
    finally:
        neighbours.close()
    return NeighbourReport(
        alone=alone,
        beside_idle=beside_idle,
        beside_busy=beside_busy,
        passes_alone=passes_alone,
        passes_beside=passes_beside,
    )


def neighbour_lines(report: NeighbourReport) -> list[str]:
    """Return the report as text."""
    idle, busy = report.beside_idle / report.alone, report.beside_busy / report.alone
    return [
        f"a counting process on each core keeps {idle:.2f} of its speed beside an idle model, {busy:.2f} beside passes",
        f"passes a second: {report.passes_alone:.1f} alone, {report.passes_beside:.1f} beside them "
        f"({report.passes_beside / report.passes_alone:.2f})",
    ]
