"""How many threads a pass uses when nobody says so."""

from __future__ import annotations

import os

__all__ = ["default_num_threads"]


def default_num_threads() -> int:
    """Return DSPARK_NUM_THREADS when set, else the processors this process may use, at most 16."""
    wanted = os.environ.get("DSPARK_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    return min(len(os.sched_getaffinity(0)), 16)
