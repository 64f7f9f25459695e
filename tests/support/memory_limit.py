"""A process that may map little more than it has, to see what a lack of memory does."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ALONE = "DSPARK_TEST_ALONE"


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """Let this process map `more` bytes beyond what it has mapped, no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a process of its own: in this one the allocator may have kept what earlier tests gave back."""

    @functools.wraps(test)
    def run() -> None:
        if _ALONE in os.environ:
            return test()
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node],
            cwd=Path(__file__).parents[2], env=os.environ | {_ALONE: "1"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
        return None

    return run
