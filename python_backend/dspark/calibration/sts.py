"""Sequential temperature scaling and the measures of a calibration (algorithm.md, section 5).

Pure functions over numpy arrays. They know nothing of engines, files or clocks. What they are given was
observed at full block or under a schedule: a position that was cut off is unknown, never a failure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspark.calibration.logistic import information, logistic_weights, sigmoid
from dspark.errors import ConfigError

__all__ = [
    "ReliabilityBins",
    "ScaledFit",
    "StsFit",
    "auc",
    "brier",
    "ece",
    "ece_of_perfect",
    "fit_scaled",
    "fit_sts",
    "forecast_survival",
    "reliability",
    "survival",
    "survival_labels",
]

Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

NUM_BINS = 15
TOLERANCE = 2e-4  # ECE differences below this are noise
DEFAULT_GRID: Float64 = np.exp(np.linspace(np.log(0.25), np.log(4.0), 161))  # temperatures tried


@dataclass(frozen=True, slots=True, kw_only=True)
class StsFit:
    """One temperature for each draft position, and the ECE of the survival before and after."""

    temperatures: Float64  # [G]
    ece_before: Float64  # [G]
    ece_after: Float64  # [G]
    num_samples: npt.NDArray[np.int64]  # [G] blocks whose outcome at position k is known


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBins:
    """A reliability diagram: mean forecast and observed rate of each bin that holds samples."""

    forecast: Float64  # [b]
    observed: Float64  # [b]
    weight: Float64  # [b] share of the samples, sums to 1


def survival_labels(accepted: npt.ArrayLike, verify_len: npt.ArrayLike, block_size: int) -> tuple[Bool, Bool]:
    """Return what is known of "positions 1..k were all accepted".

    Arguments:
        accepted: [N] accepted drafts of each block.
        verify_len: [N] drafts that were verified, at least `accepted`.
        block_size: G.

    Returns:
        labels [N, G], and known [N, G]: position k is known when it was verified or an earlier one failed.
    """
    accepted = np.asarray(accepted, np.int64)[:, None]
    verified = np.asarray(verify_len, np.int64)[:, None]
    if np.any(accepted > verified) or np.any(accepted < 0):
        raise ConfigError("accepted drafts must lie between 0 and verify_len in every block")
    position = np.arange(1, block_size + 1)[None, :]
    return accepted >= position, (position <= verified) | (accepted < verified)


def survival(logits: npt.ArrayLike, temperatures: npt.ArrayLike | None = None) -> Float64:
    """Return a_k = prod_{i <= k} sigmoid(z_i / T_i) [N, G] for logits [N, G]."""
    z = np.asarray(logits, np.float64)
    if temperatures is not None:
        z = z / np.asarray(temperatures, np.float64)[None, :]
    return np.asarray(np.cumprod(sigmoid(z), axis=1))


def ece(forecast: npt.ArrayLike, label: npt.ArrayLike, *, num_bins: int = NUM_BINS) -> float:
    """Return the expected calibration error over `num_bins` bins of equal width; 0 for no samples."""
    p, y = _pair(forecast, label)
    if p.size == 0:
        return 0.0
    which = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    gap = np.bincount(which, weights=p - y, minlength=num_bins)
    return float(np.abs(gap).sum() / p.size)


def ece_of_perfect(
    forecast: npt.ArrayLike, *, num_bins: int = NUM_BINS, num_draws: int = 20, seed: int = 0
) -> float:
    """Return the ECE that these forecasts would show on average if every one of them were true.

    With few samples in a bin it is not 0: what a measured ECE must be read against.
    """
    p = np.asarray(forecast, np.float64).ravel()
    rng = np.random.default_rng(seed)
    return float(np.mean([ece(p, rng.random(p.size) < p, num_bins=num_bins) for _ in range(num_draws)]))


def reliability(
    forecast: npt.ArrayLike, label: npt.ArrayLike, *, num_bins: int = NUM_BINS
) -> ReliabilityBins:
    """Return the reliability diagram over bins of equal width; empty bins are left out."""
    p, y = _pair(forecast, label)
    which = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    count = np.bincount(which, minlength=num_bins)
    kept = count > 0
    return ReliabilityBins(
        forecast=np.bincount(which, weights=p, minlength=num_bins)[kept] / count[kept],
        observed=np.bincount(which, weights=y, minlength=num_bins)[kept] / count[kept],
        weight=count[kept] / max(p.size, 1),
    )


def brier(forecast: npt.ArrayLike, label: npt.ArrayLike) -> float:
    """Return the mean squared error of the forecast; 0 for no samples."""
    p, y = _pair(forecast, label)
    return float(np.mean((p - y) ** 2)) if p.size else 0.0


def auc(score: npt.ArrayLike, label: npt.ArrayLike) -> float:
    """Return P(score of a success > score of a failure), ties counted half; NaN when one kind is missing."""
    s, y = _pair(score, label)
    positive = y > 0.5
    num_positive = int(positive.sum())
    num_negative = s.size - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, inverse, counts = np.unique(s, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0  # ranks from 1, ties share theirs
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2.0) / (num_positive * num_negative)


def fit_sts(
    logits: npt.ArrayLike,
    labels: npt.ArrayLike,
    known: npt.ArrayLike | None = None,
    *,
    grid: npt.ArrayLike = DEFAULT_GRID,
) -> StsFit:
    """Fit one temperature per position, left to right.

    T_k minimises the ECE of the cumulative product with T_1..T_{k-1} frozen; among equals (up to
    `TOLERANCE`) the one nearest to 1 wins. Dividing by a positive number keeps the order of the
    confidences of a position.

    Arguments:
        logits: [N, G] confidence logits.
        labels: [N, G] "positions 1..k all accepted" (see `survival_labels`).
        known: [N, G] False where the outcome was cut off; None = all known.
        grid: positive temperatures to try; 1 is always tried as well.

    Raises:
        ConfigError: shapes that do not match, non-finite logits, a temperature that is not positive.
    """
    z = np.asarray(logits, np.float64)
    y = np.asarray(labels, np.float64)
    seen = np.ones(z.shape, np.bool_) if known is None else np.asarray(known, np.bool_)
    tried = np.unique(np.append(np.asarray(grid, np.float64), 1.0))
    if z.ndim != 2 or y.shape != z.shape or seen.shape != z.shape:
        raise ConfigError(
            f"logits, labels and known must share one shape [N, G], got {z.shape}, {y.shape}, {seen.shape}"
        )
    if not np.all(np.isfinite(z)):
        raise ConfigError("confidence logits must be finite")
    if tried[0] <= 0.0 or not np.all(np.isfinite(tried)):
        raise ConfigError(f"temperatures must be positive and finite, got {float(tried[0])}")
    tried = tried[np.argsort(np.abs(np.log(tried)), kind="stable")]  # nearest to 1 first

    num_positions = z.shape[1]
    temperatures = np.ones(num_positions)
    before, after = np.zeros(num_positions), np.zeros(num_positions)
    raw = survival(z)
    prefix = np.ones(z.shape[0])
    for k in range(num_positions):
        at = seen[:, k]
        errors = [ece(prefix[at] * sigmoid(z[at, k] / t), y[at, k]) for t in tried]
        best = int(np.flatnonzero(np.array(errors) <= min(errors) + TOLERANCE)[0])
        temperatures[k] = tried[best]
        before[k] = ece(raw[at, k], y[at, k])
        after[k] = errors[best]
        prefix = prefix * sigmoid(z[:, k] / temperatures[k])
    return StsFit(
        temperatures=temperatures,
        ece_before=before,
        ece_after=after,
        num_samples=seen.sum(axis=0).astype(np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFit:
    """A temperature and a shift for each position, c_k = sigmoid(z_k / T_k + s_k)."""

    temperatures: Float64  # [G]
    shifts: Float64  # [G]


def fit_scaled(logits: npt.ArrayLike, accepted: npt.ArrayLike, verify_len: npt.ArrayLike) -> ScaledFit:
    """Fit P(x_k accepted | x_1..x_{k-1} accepted, z_k) at every position by maximum likelihood.

    A temperature alone leaves a confidence of 0.5 where it is; a drafter that meets easier or harder text than its
    confidence head did is off there too. The slope 1 / T stays above 0, so the order of confidences stays.

    Arguments:
        logits: [N, G], finite.
        accepted, verify_len: [N] as for `survival_labels`.
    """
    z = np.asarray(logits, np.float64)
    labels, known = survival_labels(accepted, verify_len, z.shape[1])
    reached = known & np.concatenate([np.ones_like(labels[:, :1]), labels[:, :-1]], axis=1)
    slopes, shifts = np.transpose([_logistic_line(z[at, k], labels[at, k]) for k, at in enumerate(reached.T)])
    return ScaledFit(temperatures=1.0 / slopes, shifts=shifts)


def forecast_survival(logits: npt.ArrayLike, fit: ScaledFit | None) -> Float64:
    """Return a_k = prod_{i <= k} sigmoid(z_i / T_i + s_i) [N, G] for logits [N, G]; None: T = 1, s = 0."""
    z = np.asarray(logits, np.float64)
    return survival(z if fit is None else z / fit.temperatures + fit.shifts)


_LINE_PRIOR, _LINE_LABELS = np.array([1.0, 0.0]), 30.0  # no change, worth so many labels
_LEAST_LINE = np.array([0.05, -np.inf])


def _logistic_line(z: Float64, hit: Bool) -> Float64:
    """Return slope and shift [2] of the most likely sigmoid(slope z + shift)."""
    x = np.stack([z, np.ones_like(z)], axis=1)
    precision = _LINE_LABELS * (0.05 * np.eye(2) + information(x, _LINE_PRIOR))
    return logistic_weights(x, hit, prior=_LINE_PRIOR, precision=precision, least=_LEAST_LINE)


def _pair(forecast: npt.ArrayLike, label: npt.ArrayLike) -> tuple[Float64, Float64]:
    p = np.asarray(forecast, np.float64).ravel()
    y = np.asarray(label, np.float64).ravel()
    if p.shape != y.shape:
        raise ConfigError(f"forecasts and labels must be as many, got {p.size} and {y.size}")
    return p, y
