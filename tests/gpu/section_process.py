"""One section in a process of its own: what hangs in it is ended, what breaks the GPU's context breaks no other.

    python -m gpu.section_process MODULE SECTION SECONDS FILE

The parent bounds it (`bounded`). FILE is written anew at every question for the time left, so that a section that is
ended has told all but its last case.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu.results import Check, Results

__all__ = ["bounded"]


def bounded(results: Results, name: str, *, seconds: float, grace_s: float, module: str) -> None:
    """Run a section, and add what it told to `results`.

    Arguments:
        seconds: what the section is told to take at most; it leaves out what does not fit.
        grace_s: and what it gets beyond that for its last case, before it is ended with all its processes.
        module: has the section in its SECTIONS.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        words = [sys.executable, "-m", "gpu.section_process", module, name, f"{seconds:.1f}", str(file)]
        begin = time.perf_counter()
        process = subprocess.Popen(words, stdout=sys.stderr, start_new_session=True)
        try:
            status: int | None = process.wait(seconds + grace_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        results.seconds[name] = round(time.perf_counter() - begin, 2)
        if file.exists():
            results.add(file.read_text(encoding="utf-8"))
    if status is None:
        told = f"had not ended {seconds + grace_s:.0f} s after its start and was ended"
        results.checks.append(Check(name, "ends in time", False, told))
    elif status:
        results.checks.append(
            Check(name, "runs to its end", False, f"its process ended with status {status}")
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with the processes it started, also when it has gone before them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(module: str, name: str, seconds: str, file: str) -> None:
    """Run the section; its own errors are among the results."""
    stop = time.monotonic() + float(seconds)
    results = Results()

    def save() -> None:
        part = Path(f"{file}.part")
        part.write_text(results.json(), encoding="utf-8")
        part.replace(file)

    def time_left() -> float:
        save()
        return stop - time.monotonic()

    with results.section(name):
        importlib.import_module(module).SECTIONS[name](results, time_left)
    save()


if __name__ == "__main__":
    main(*sys.argv[1:])
