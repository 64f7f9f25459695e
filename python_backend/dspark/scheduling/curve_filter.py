"""What observed steps say of a cost curve: its height, what a cached token takes beyond it, and how its shape is off.

A Gaussian belief over all three together, moved by least squares that forget. They have to be moved together: eight
rows more that take twice what the curve says look, step by step, like a machine that is a little slower. The shape is
a smooth error over the logarithm of the size: what is seen at some sizes is believed, less and less, of those around.
"""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import numpy.typing as npt

__all__ = ["CurveFilter", "Float64", "knot_weights"]

Float64 = npt.NDArray[np.float64]

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 16384)
_LOG_KNOTS = np.log(_KNOTS)  # log sizes between which the error of the shape is linear
_HEIGHT, _TOKEN, _SHAPE = 0, 1, 2  # entries of the belief; from the last one on, one for each knot
_SHAPE_SPREAD = 0.1  # relative error of a measured shape near one size
_GUESS_SPREAD = 0.3  # likewise of a guessed one
_REACH = 1.0  # difference of log sizes over which errors of the shape are related by 1/e
_TOKEN_UNIT = 1e-4  # seconds of one cached token, in those of the smallest pass: a usual size
_TOKEN_SPREAD = 3.0  # of those units: how uncertain they are at first
_HEIGHT_FORGETS = 0.0036  # variance that the height gains with every step, in those of one residual
_TOKEN_FORGETS = 1e-5  # share of its first variance that the token's time regains with every step
_SHAPE_FORGETS = 0.003  # likewise the shape's
_CUT = 2.5  # residuals beyond this many usual ones are cut
_SPELL = 4  # steps from which a common error tells a change of the machine from a slow step
_OTHER_MACHINE = 0.2  # and by how much: less may be an error of the shape near these sizes alone
_USUAL = 0.05  # relative error that is taken as usual before any was seen


def knot_weights(log_sizes: Float64) -> Float64:
    """Return how much each knot counts for sizes [B, K]: linear between them in the logarithm of the size."""
    low = np.clip(np.searchsorted(_LOG_KNOTS, log_sizes, side="right") - 1, 0, len(_KNOTS) - 2)
    right = np.clip((log_sizes - _LOG_KNOTS[low]) / (_LOG_KNOTS[low + 1] - _LOG_KNOTS[low]), 0.0, 1.0)
    weights = np.zeros((len(log_sizes), len(_KNOTS)))
    at = np.arange(len(log_sizes))
    weights[at, low], weights[at, low + 1] = 1.0 - right, right
    return weights


class CurveFilter:
    """A belief about one curve.

    Arguments:
        prior_weight: how many observed steps the given height is worth; 0 = the curve is a guess.
        smallest_s: seconds of the smallest pass.
    """

    def __init__(self, *, prior_weight: float, smallest_s: float) -> None:
        num = _SHAPE + len(_KNOTS)
        spread = _SHAPE_SPREAD if prior_weight > 0.0 else _GUESS_SPREAD
        apart = np.abs(_LOG_KNOTS[:, None] - _LOG_KNOTS[None, :])
        self._first = np.zeros((num, num))  # covariance
        self._first[_HEIGHT, _HEIGHT] = _USUAL**2 / max(prior_weight, 1.0)
        self._first[_TOKEN, _TOKEN] = (_TOKEN_SPREAD * _TOKEN_UNIT * smallest_s) ** 2
        self._first[_SHAPE:, _SHAPE:] = spread**2 * np.exp(-apart / _REACH)
        self._covariance = self._first.copy()
        self._mean = np.zeros(num)
        self._usual = _USUAL  # relative error of one step

    @property
    def log_height(self) -> float:
        """Logarithm of how much slower than the curve the machine is, over all sizes."""
        return float(self._mean[_HEIGHT])

    @log_height.setter
    def log_height(self, value: float) -> None:
        self._mean[_HEIGHT] = value

    @property
    def token_s(self) -> float:
        """Seconds of a cached token, beyond what was measured for it."""
        return float(self._mean[_TOKEN])

    @property
    def shape(self) -> Float64:
        """Logarithm of the correction at each knot [K]."""
        return self._mean[_SHAPE:]

    def uncertainty(self, weights: Float64) -> float:
        """Return the standard deviation of a weighted sum of the shape [K].

        Of the difference of two `knot_weights` it is how far, relative, the ratio of their seconds may be off.
        """
        return math.sqrt(max(float(weights @ self._covariance[_SHAPE:, _SHAPE:] @ weights), 0.0))

    def observe(
        self, residuals: Float64, *, by_height: Float64, by_token: Float64, by_shape: Float64
    ) -> None:
        """Take what some steps took beyond what was expected of them.

        Arguments:
            residuals: [n] logarithm of the seconds over those expected.
            by_height, by_token: [n] slopes of the logarithm of the expected seconds.
            by_shape: [n, K] likewise, for each knot.
        """
        num = len(residuals)
        self._forget(num)
        slopes = np.concatenate([by_height[:, None], by_token[:, None], by_shape], axis=1)
        shared = slopes @ self._covariance  # [n, *]
        noise = self._usual**2
        limit = _CUT * np.sqrt((shared * slopes).sum(axis=1) + noise)
        common = _common_error(residuals, at_least=max(self._usual, _OTHER_MACHINE))
        if common:  # the height may follow at once
            self._covariance[_HEIGHT, _HEIGHT] += common**2
            shared[:, _HEIGHT] += common**2 * by_height
        residuals = common + np.clip(residuals - common, -limit, limit)
        gain = np.linalg.solve(shared @ slopes.T + noise * np.eye(num), shared)  # [n, *]
        self._mean += residuals @ gain
        # Joseph's form: a covariance whatever is lost to rounding. `covariance - shared.T @ gain` is the same on paper,
        # and was none after a hundred batches of a token's tiny and a height's large variance.
        left = np.eye(len(self._mean)) - gain.T @ slopes
        covariance = left @ self._covariance @ left.T + noise * (gain.T @ gain)
        self._covariance = 0.5 * (covariance + covariance.T)
        self._learn_usual(residuals)

    def _forget(self, num_steps: int) -> None:
        """Make the belief as uncertain as it has become since the last steps."""
        kept = 1.0 - min(_SHAPE_FORGETS * num_steps, 1.0)
        self._covariance[_SHAPE:, :] *= math.sqrt(kept)
        self._covariance[:, _SHAPE:] *= math.sqrt(kept)
        self._covariance[_SHAPE:, _SHAPE:] += (1.0 - kept) * self._first[_SHAPE:, _SHAPE:]
        self._covariance[_HEIGHT, _HEIGHT] += _HEIGHT_FORGETS * self._usual**2 * num_steps
        regained = _TOKEN_FORGETS * self._first[_TOKEN, _TOKEN] * num_steps
        if self._covariance[_TOKEN, _TOKEN] < self._first[_TOKEN, _TOKEN]:
            self._covariance[_TOKEN, _TOKEN] += regained

    def _learn_usual(self, residuals: Float64) -> None:
        sizes = residuals.tolist()
        usual = median(sizes) if len(sizes) >= _SPELL else 0.0
        for size in (abs(residual - usual) for residual in sizes):
            self._usual += 0.05 * (min(size, 4.0 * _CUT * self._usual) - self._usual)
        self._usual = min(max(self._usual, 0.01), 1.0)


def _common_error(residuals: Float64, *, at_least: float) -> float:
    """Return what most of a few steps in a row have in common, 0 where that is little: it is another machine."""
    if len(residuals) < _SPELL:
        return 0.0
    common: float = median(residuals.tolist())
    return common if abs(common) > at_least else 0.0
