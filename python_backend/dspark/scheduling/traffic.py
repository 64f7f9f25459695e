"""Traffic for the simulator: who arrives when, and what a drafter would do for them.

A kind of traffic is described by the true log-odds of acceptance (normal around a mean that falls along the
block, with a part that belongs to the whole request) and by what the confidence head says of them
(stretched and shifted). Or real blocks are replayed, as `dspark-build eval` records them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduling.interface import Bool, Float32, Float64, Int64

__all__ = ["Acceptance", "Arrival", "TrafficKind", "arrivals_of", "load_acceptance"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficKind:
    """One kind of request. Log-odds are of "accepted, given that all before it were"."""

    name: str
    share: float = 1.0  # of the requests
    mean: float = 1.0  # log-odds at the first position
    fall: float = 0.1  # per position
    spread: float = 1.0  # from token to token
    request_spread: float = 0.5  # from request to request
    overconfidence: float = 1.0  # the head's log-odds over the true ones
    shift: float = 0.0
    prompt_len: int = 200  # tokens
    output_len: int = 200  # tokens, mean of a geometric distribution

    def __post_init__(self) -> None:
        for name in ("share", "mean", "fall", "spread", "request_spread", "overconfidence", "shift"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigError(f"{name} of {self.name!r}: got {value!r}, allowed is a finite number")
        for name in ("share", "spread", "request_spread", "overconfidence"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} of {self.name!r}: got {getattr(self, name)!r}, allowed is a number >= 0"
                )
        for name in ("prompt_len", "output_len"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of {self.name!r}: got {value!r}, allowed is a whole number >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What drafts are worth: kinds of traffic, or recorded blocks that are replayed."""

    block_size: int  # G
    kinds: tuple[TrafficKind, ...]
    blocks_logits: Float32 | None = field(default=None)  # [N, G] recorded confidence logits
    blocks_accepted: Int64 | None = field(default=None)  # [N] accepted drafts of the full block

    def draw(self, rng: np.random.Generator, kinds: Int64, request_odds: Float64) -> tuple[Float32, Bool]:
        """Draw a block for each sequence.

        Arguments:
            kinds: [R] index of the kind of each sequence.
            request_odds: [R] the request's own part of the log-odds, in spreads.

        Returns:
            confidence logits [R, G] and whether each draft would be accepted [R, G].
        """
        if self.blocks_logits is not None and self.blocks_accepted is not None:
            at = rng.integers(len(self.blocks_accepted), size=len(kinds))
            hit = np.arange(self.block_size) < self.blocks_accepted[at][:, None]
            return self.blocks_logits[at], hit
        table = np.array(
            [[k.mean, k.fall, k.spread, k.request_spread, k.overconfidence, k.shift] for k in self.kinds]
        )[kinds]
        mean, fall, spread, request_spread, stretch, shift = table.T[:, :, None]
        odds = mean - fall * np.arange(self.block_size) + request_spread * request_odds[:, None]
        odds = odds + spread * rng.normal(size=odds.shape)
        hit = rng.random(odds.shape) < 1.0 / (1.0 + np.exp(-odds))
        return (stretch * odds + shift).astype(np.float32), hit


def load_acceptance(path: Path) -> Acceptance:
    """Read `{"block_size": G, "kinds": [{...}]}` or `{"block_size": G, "blocks": [{"logits", "accepted"}]}`.

    Raises:
        ConfigError: not readable, or values out of range, by name.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        block_size = content["block_size"]
        if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= 64:
            raise ConfigError(f"block_size: got {block_size!r}, allowed is a whole number from 1 to 64")
        if "blocks" in content:
            return _recorded(content["blocks"], block_size)
        kinds = tuple(TrafficKind(**kind) for kind in content["kinds"])
        if not kinds or not sum(kind.share for kind in kinds) > 0.0:
            raise ConfigError("kinds: got none with a share above 0, allowed is at least one")
        return Acceptance(block_size=block_size, kinds=kinds)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"{path}: not an acceptance file: {error}") from error


def _recorded(blocks: list[dict[str, Any]], block_size: int) -> Acceptance:
    logits = np.array([block["logits"] for block in blocks], np.float32)
    accepted = np.array([block["accepted"] for block in blocks], np.int64)
    if logits.shape != (len(blocks), block_size) or not len(blocks) or not np.all(np.isfinite(logits)):
        raise ConfigError(f"blocks: allowed are one or more, each with {block_size} finite logits")
    if np.any(accepted < 0) or np.any(accepted > block_size):
        raise ConfigError(f"accepted: allowed are whole numbers from 0 to {block_size}")
    return Acceptance(
        block_size=block_size,
        kinds=(TrafficKind(name="recorded"),),
        blocks_logits=logits,
        blocks_accepted=accepted,
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request on its way."""

    time_s: float
    kind: int
    prompt_len: int
    output_len: int
    odds: float  # the request's own part of the log-odds, in spreads


def arrivals_of(text: str, acceptance: Acceptance, *, seed: int) -> tuple[Iterator[Arrival], int | None]:
    """Parse `closed:N`, `poisson:RATE` (requests per second) or the name of a file with one arrival time a line.

    Returns:
        the requests in order of time, and N when there are always N of them (the times are then 0).

    Raises:
        ConfigError: naming the value and what is allowed.
    """
    allowed = "closed:N, poisson:RATE with RATE > 0, or a file with one arrival time in seconds a line"
    name, _, value = text.partition(":")
    if name == "closed":
        if not (value.isascii() and value.isdigit() and 0 < int(value) <= 65536):
            raise ConfigError(f"arrivals: got {text!r}, allowed is {allowed}")
        return _requests(_zeros(), acceptance, seed), int(value)
    if name == "poisson":
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not (math.isfinite(rate) and rate > 0.0):
            raise ConfigError(f"arrivals: got {text!r}, allowed is {allowed}")
        return _requests(_poisson(rate, seed), acceptance, seed), None
    try:
        times = sorted(float(line) for line in Path(text).read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise ConfigError(f"arrivals: got {text!r}, allowed is {allowed} ({error})") from error
    if not times or not all(math.isfinite(t) and t >= 0.0 for t in times):
        raise ConfigError(f"arrivals: {text}: allowed are finite times >= 0, at least one")
    return _requests(iter(times), acceptance, seed), None


def _zeros() -> Iterator[float]:
    while True:
        yield 0.0


def _poisson(rate: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng([seed, 1])
    time_s = 0.0
    while True:
        time_s += float(rng.exponential(1.0 / rate))
        yield time_s


def _requests(times: Iterator[float], acceptance: Acceptance, seed: int) -> Iterator[Arrival]:
    rng = np.random.default_rng([seed, 2])
    shares = np.array([kind.share for kind in acceptance.kinds])
    shares = shares / shares.sum()
    for time_s in times:
        which = int(rng.choice(len(shares), p=shares))
        kind = acceptance.kinds[which]
        yield Arrival(
            time_s, which, kind.prompt_len, int(rng.geometric(1.0 / kind.output_len)), float(rng.normal())
        )
