"""What a load test measures: modes that are compared, loads they are put under, and the figures that come out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from dspark_client.perf_analyzer import Trace

__all__ = ["Cell", "Load", "Mode", "parse_loads", "parse_modes"]


@dataclass(frozen=True, slots=True)
class Mode:
    """What is compared: a name, a server, and perhaps a cap on the drafts."""

    name: str
    url: str
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """One load: its name, perf_analyzer's options, how many requests."""

    name: str
    options: tuple[str, ...]
    num_requests: int
    intervals_us: tuple[int, ...] = ()  # of bursts


@dataclass(slots=True)
class Cell:
    """What one mode did under one load; the figures of each round, and its errors."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    traces: list[Sequence[Trace]] = field(default_factory=list)  # of each round
    errors: list[str] = field(default_factory=list)

    def median(self) -> dict[str, float]:
        """Return the median of every figure over the rounds; empty where all failed."""
        if not self.rounds:
            return {}
        return {name: statistics.median(one[name] for one in self.rounds) for name in self.rounds[0]}


def parse_modes(given: Sequence[str], url: str) -> list[Mode]:
    """Return the modes: `plain`, `scheduled`, or `NAME=URL` for a server of its own.

    Raises:
        ValueError: naming what cannot be read.
    """
    modes = []
    for text in given:
        name, _, other = text.partition("=")
        if other:
            modes.append(Mode(name, other))
        elif name == "plain":
            modes.append(Mode(name, url, 0))
        elif name == "scheduled":
            modes.append(Mode(name, url))
        else:
            raise ValueError(f"mode: got {text!r}, allowed is plain, scheduled or NAME=HOST:PORT")
    return modes


def parse_loads(
    *,
    concurrencies: Sequence[int],
    rates: Sequence[float],
    bursts: Sequence[tuple[int, float]],
    requests_per_user: int,
) -> list[Load]:
    """Return the loads.

    Arguments:
        concurrencies: users who each wait for their answer.
        rates: requests per second, Poisson.
        bursts: (requests at once, seconds until the next burst).
        requests_per_user: of every load; at least 8 requests in all.
    """
    loads = [
        Load(
            f"{users} user" + ("s" if users > 1 else ""),
            ("--concurrency-range", str(users)),
            max(8, users * requests_per_user),
        )
        for users in concurrencies
    ]
    for rate in rates:
        options = ("--request-rate-range", f"{rate:g}", "--request-distribution", "poisson")
        loads.append(Load(f"{rate:g}/s", options, max(8, 4 * requests_per_user, math.ceil(rate))))
    for size, gap_s in bursts:
        intervals = (*([1] * (size - 1)), int(gap_s * 1e6))
        loads.append(Load(f"{size} every {gap_s:g} s", (), max(8, size * requests_per_user), intervals))
    return loads
