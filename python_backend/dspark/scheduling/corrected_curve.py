"""One cost curve over sizes, corrected by observation.

    seconds(size, tokens) = factor * (curve(size) * exp(local(size)) + known) + token_s * tokens

`known` is what was measured for the cached tokens of the pass, `token_s` what serving finds they take beyond that. The
measured shape, cliffs and all, stays; what moves is its height: first everywhere (`factor`, together with `token_s`, by
least squares that forget), then near the sizes that are seen (`local`). One slow step (another process, a page fault)
moves little: residuals are cut at a few times their usual size. Steps are taken several at a time, so that learning
costs a few array calls for all of them.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["CorrectedCurve", "Float64"]

Float64 = npt.NDArray[np.float64]

_KNOTS = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 16384]
)
_LOG_KNOTS = np.log(_KNOTS)
_LOCAL_MOST = 33.0  # steps that the local part remembers
_FORGET = 0.0036  # variance that the height gains with every step, in those of one residual
_TOKEN_FORGET = 1e-4  # likewise of `token_s`, in units of its first uncertainty
_TOKEN_UNIT = 1e-4  # seconds of one cached token, in those of the smallest pass: a usual size
_TOKEN_SPREAD = 3.0  # of those units: how uncertain `token_s` is at first
_CUT = 2.5  # residuals beyond this many usual ones are cut
_SPELL = 4  # steps from which a common error tells a change of the machine from a slow step
_USUAL = 0.05  # relative error that is taken as usual before any was seen
_WARM = 5  # first steps of a curve without a measured height: their median counts


class CorrectedCurve:
    """Seconds by size.

    Arguments:
        sizes: ascending, >= 1.
        seconds: at those sizes; only the shape counts when `prior_weight` is 0.
        prior_weight: how many observed steps the given height is worth.
    """

    def __init__(self, sizes: tuple[int, ...], seconds: tuple[float, ...], *, prior_weight: float) -> None:
        self._sizes = np.asarray(sizes, np.float64)
        self._seconds = np.asarray(seconds, np.float64)
        self.known = prior_weight > 0.0
        self._log_factor = 0.0
        self.token_s = 0.0
        self._local = np.zeros(len(_KNOTS))
        self._unseen_weight = prior_weight + 1.0
        self._local_weight = np.full(len(_KNOTS), self._unseen_weight)
        self._usual = _USUAL
        self._first: list[float] | None = None if self.known else []
        self._token_unit = _TOKEN_UNIT * float(self._seconds[0])
        self._variance = np.array(  # of log factor and token_s [2, 2]
            [[_USUAL**2 / max(prior_weight, 1.0), 0.0], [0.0, (_TOKEN_SPREAD * self._token_unit) ** 2]]
        )
        self._errors: deque[float] = deque(maxlen=129)
        self._base = np.zeros(0)  # [B] base seconds at 1, 2, ...
        self._log_sizes = np.zeros(0)  # [B]
        self._table = np.zeros(0)  # [B] corrected
        self.version = 0  # rises whenever the table changes

    @property
    def factor(self) -> float:
        """How much slower than the curve this machine is now, over all sizes."""
        return math.exp(self._log_factor)

    @property
    def error(self) -> float:
        """Median relative error of the last predictions; 0 with none."""
        return float(np.median(self._errors)) if self._errors else 0.0

    def seconds(self, first: int, count: int) -> Float64:
        """Return the seconds at first .. first+count-1 without cached tokens, float64 [count]. Not to be written to."""
        end = first - 1 + count
        if end > len(self._table):
            self._grow(end)
        return self._table[first - 1 : end]

    def observe(
        self, sizes: npt.NDArray[np.int64], seconds: Float64, *, tokens: Float64, known_s: Float64
    ) -> Float64:
        """Take the times of some steps and return what each had been expected to take, float64 [n].

        Arguments:
            sizes: [n] >= 1.
            seconds: [n] finite and > 0.
            tokens: [n] cached tokens.
            known_s: [n] what was measured for them, before the factor.
        """
        if int(sizes.max()) > len(self._base):
            self._grow(int(sizes.max()))
        low = np.searchsorted(_KNOTS, sizes, side="right") - 1
        high = np.minimum(low + 1, len(_KNOTS) - 1)
        right = np.where(
            high > low,
            (self._log_sizes[sizes - 1] - _LOG_KNOTS[low])
            / np.maximum(_LOG_KNOTS[high] - _LOG_KNOTS[low], 1e-9),
            0.0,
        )
        local = (1.0 - right) * self._local[low] + right * self._local[high]
        in_proportion = self.factor * (self._base[sizes - 1] * np.exp(local) + known_s)
        expected = np.maximum(in_proportion + self.token_s * tokens, 0.1 * in_proportion)
        if self.known:
            self._errors.extend((np.abs(expected - seconds) / seconds).tolist())
        residual = np.log(seconds / expected)
        if self._first is not None:
            self._first.extend((residual + self._log_factor).tolist())
            self._log_factor = float(np.median(self._first))
            if len(self._first) >= _WARM:
                self._first = None
        else:
            residual = self._cut(residual)
            residual = self._learn_height(residual, in_proportion / expected, tokens / expected)
            self._learn_local(residual, low, high, right)
        self._refresh()
        self.known = True
        return np.asarray(expected)

    def _cut(self, residual: Float64) -> Float64:
        """Return the residuals cut at a few usual ones, and learn what is usual.

        What most of a few steps in a row have in common is no slow step but another machine: it is not cut, and the
        height may follow at once.
        """
        common = float(np.median(residual)) if len(residual) >= _SPELL else 0.0
        cut = _CUT * self._usual
        if abs(common) > self._usual:
            self._variance[0, 0] += common**2
        else:
            common = 0.0
        rest = residual - common
        rate = 1.0 - 0.95 ** len(residual)
        mean = float(np.minimum(np.abs(rest), 4.0 * cut).mean())
        self._usual = min(max((1.0 - rate) * self._usual + rate * mean, 0.01), 1.0)
        return np.asarray(common + np.clip(rest, -cut, cut))

    def _learn_height(self, residual: Float64, share: Float64, per_token: Float64) -> Float64:
        """Move factor and token_s; return what is left of the residuals.

        Arguments:
            share: [n] of the expected seconds that follow the factor.
            per_token: [n] cached tokens over the expected seconds.
        """
        slope = np.stack([share, per_token], axis=1)  # [n, 2] of the logarithm by log factor and token_s
        noise = self._usual**2
        self._variance[0, 0] += _FORGET * noise * len(residual)
        self._variance[1, 1] += _TOKEN_FORGET * (_TOKEN_SPREAD * self._token_unit) ** 2 * len(residual)
        gain = (
            self._variance
            @ slope.T
            @ np.linalg.inv(slope @ self._variance @ slope.T + noise * np.eye(len(slope)))
        )
        step = gain @ residual
        self._variance = self._variance - gain @ slope @ self._variance
        self._log_factor += float(step[0])
        self.token_s += float(step[1])
        return residual - slope @ step

    def _learn_local(
        self,
        residual: Float64,
        low: npt.NDArray[np.int64],
        high: npt.NDArray[np.int64],
        right: Float64,
    ) -> None:
        num = len(_KNOTS)
        share = np.bincount(low, 1.0 - right, num) + np.bincount(high, right, num)
        moved = np.bincount(low, (1.0 - right) * residual, num) + np.bincount(high, right * residual, num)
        self._local += moved / (np.minimum(self._local_weight, _LOCAL_MOST) + share)
        self._local_weight += share

    def _grow(self, size: int) -> None:
        """Extend the table to `size`; past the measured sizes the steeper of the mean and the last slope goes on."""
        size = max(size, 2 * len(self._base), 64)
        at = np.arange(1, size + 1, dtype=np.float64)
        base = np.interp(at, self._sizes, self._seconds)
        beyond = at > self._sizes[-1]
        if beyond.any() and len(self._sizes) > 1:
            half = int(np.searchsorted(self._sizes, self._sizes[-1] / 2, side="right")) - 1
            rise = [
                (self._seconds[-1] - self._seconds[k]) / (self._sizes[-1] - self._sizes[k])
                for k in (0, max(half, 0))
            ]
            base = np.where(beyond, self._seconds[-1] + max(*rise, 0.0) * (at - self._sizes[-1]), base)
        self._base = base
        self._log_sizes = np.log(at)
        self._refresh()

    def _refresh(self) -> None:
        seen = self._local_weight > self._unseen_weight
        if seen.any():  # sizes never seen go the way of their nearest neighbours that were
            self._local = np.interp(_LOG_KNOTS, _LOG_KNOTS[seen], self._local[seen])
        table = self._base * np.exp(self._log_factor + np.interp(self._log_sizes, _LOG_KNOTS, self._local))
        # More rows never cost less: half way between the lowest curve above the table and the highest below it.
        above = np.maximum.accumulate(table)
        below = np.minimum.accumulate(table[::-1])[::-1]
        self._table = 0.5 * (above + below)
        self._table.flags.writeable = False
        self.version += 1
