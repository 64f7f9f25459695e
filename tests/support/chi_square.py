"""A chi-square goodness-of-fit test for the laws of sampling, without scipy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["assert_distributed_as"]


def assert_distributed_as(
    counts: npt.ArrayLike, probs: npt.ArrayLike, *, significance: float = 1e-5, min_expected: float = 5.0
) -> None:
    """Fail when counts [n] are too unlikely under probs [n]; cells with small expectation are joined.

    The p-value is by Wilson and Hilferty's cube-root approximation. What has probability 0 must not occur.
    """
    observed, weights = np.asarray(counts, np.float64).ravel(), np.asarray(probs, np.float64).ravel()
    assert not observed[weights == 0].any(), "an impossible outcome occurred"
    expected = weights / weights.sum() * observed.sum()
    rare = expected < min_expected
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return
    statistic = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    p_value = 0.5 * math.erfc(z / math.sqrt(2))
    assert p_value > significance, (
        f"chi-square {statistic:.1f} at {freedom} degrees of freedom: p = {p_value:.2g}"
    )
