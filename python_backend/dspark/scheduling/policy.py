"""Policies by name: what a user may write after `--policy`, and the rules that need no cost curve.

Pure functions over arrays. The rules that weigh drafts against measured cost are in `allocation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from dspark.errors import ConfigError

__all__ = ["POLICIES", "Policy", "fixed_verify_len", "parse_policy", "threshold_verify_len"]

PolicyName = Literal["none", "fixed", "threshold", "prefix", "lagged", "auto"]

POLICIES = "none, fixed:K, threshold:P, prefix, lagged or auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A parsed policy. `num_drafts` is K of `fixed:K`; `min_confidence` is P of `threshold:P`."""

    name: PolicyName
    num_drafts: int = 0
    min_confidence: float = 0.0

    @property
    def needs_cost(self) -> bool:
        """True when the rule is about throughput, not about drafts alone."""
        return self.name in ("prefix", "lagged", "auto")


def parse_policy(text: str, *, block_size: int) -> Policy:
    """Parse `none`, `fixed:K`, `threshold:P`, `prefix`, `lagged` or `auto`.

    Arguments:
        text: the policy as the user wrote it.
        block_size: G, the most drafts the drafter can make; a larger K means G.

    Raises:
        ConfigError: naming the policy, the value and what is allowed.
    """
    name, colon, value = text.partition(":")
    match name:
        case "none" | "prefix" | "lagged" | "auto" if not colon:
            return Policy(name=name)
        case "fixed":
            if not (value.isascii() and value.isdigit()):
                raise ConfigError(f"policy: got {text!r}, allowed is fixed:K with K a whole number >= 0")
            return Policy(name="fixed", num_drafts=min(int(value), block_size))
        case "threshold":
            allowed = "threshold:P with P a number in [0, 1]"
            try:
                min_confidence = float(value)
            except ValueError:
                min_confidence = math.nan
            if not 0.0 <= min_confidence <= 1.0:
                raise ConfigError(f"policy: got {text!r}, allowed is {allowed}")
            return Policy(name="threshold", min_confidence=min_confidence)
        case _:
            raise ConfigError(f"policy: got {text!r}, allowed is {POLICIES}")


def fixed_verify_len(*, num_drafts: npt.NDArray[np.int32], k: int) -> npt.NDArray[np.int32]:
    """Return min(K, num_drafts) [R]."""
    return np.minimum(num_drafts, np.int32(k))


def threshold_verify_len(
    *, confidence: npt.NDArray[np.float64], num_drafts: npt.NDArray[np.int32], min_confidence: float
) -> npt.NDArray[np.int32]:
    """Keep the leading run of drafts whose own confidence is at least `min_confidence`.

    Lossless: c_k never looks at x_k, so whether x_k is kept does not depend on x_k.

    Arguments:
        confidence: [R, G] c_k in [0, 1]; a NaN ends the run.
        num_drafts: [R].

    Returns:
        verify_len [R] int32.
    """
    keep = confidence >= min_confidence  # [R, G], False for NaN
    run = np.logical_and.accumulate(keep, axis=1).sum(axis=1)
    return np.minimum(run, num_drafts).astype(np.int32)
