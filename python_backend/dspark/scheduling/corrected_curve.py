"""One cost curve over sizes, corrected by observation.

    log cost(size) = log curve(size) + one factor + a smooth local part

The measured shape, cliffs and all, stays; what moves is its height, first everywhere and then near the
sizes that are seen. One slow step (another process, a page fault) moves little: residuals are cut at a few
times their usual size.
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
_FLOOR = 0.03  # weight of the newest step once there are many
_CUT = 2.5  # residuals beyond this many usual ones are cut
_USUAL = 0.05  # relative error that is taken as usual before any was seen
_STALE = 8  # steps after which the table is made anew
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
        self._weight = prior_weight
        self._local = np.zeros(len(_KNOTS))
        self._unseen_weight = prior_weight + 1.0
        self._local_weight = np.full(len(_KNOTS), self._unseen_weight)
        self._usual = _USUAL
        self._first: list[float] | None = None if self.known else []
        self._errors: deque[float] = deque(maxlen=129)
        self._base = np.zeros(0)  # [B] base seconds at 1, 2, ...
        self._log_sizes = np.zeros(0)  # [B]
        self._table = np.zeros(0)  # [B] corrected
        self._age = 0

    @property
    def factor(self) -> float:
        """How much slower than the curve this machine is now, over all sizes."""
        return math.exp(self._log_factor)

    @property
    def error(self) -> float:
        return float(np.median(self._errors)) if self._errors else 0.0

    def seconds(self, first: int, count: int) -> Float64:
        """Return the seconds at first .. first+count-1, float64 [count]. Not to be written to."""
        end = first - 1 + count
        if end > len(self._table):
            self._grow(end)
        return self._table[first - 1 : end]

    def observe(self, size: int, seconds: float, *, extra_s: float = 0.0) -> bool:
        """Take one time; `extra_s` of it belongs to something else. Returns whether it counted."""
        if not (math.isfinite(seconds) and seconds > 0.0):
            return False
        if size > len(self._base):
            self._grow(size)
        base = float(self._base[size - 1])
        low = int(np.searchsorted(_KNOTS, size, side="right")) - 1
        high = min(low + 1, len(_KNOTS) - 1)
        right = (
            0.0
            if high == low
            else float((math.log(size) - _LOG_KNOTS[low]) / (_LOG_KNOTS[high] - _LOG_KNOTS[low]))
        )
        local = (1.0 - right) * float(self._local[low]) + right * float(self._local[high])
        expected = base * math.exp(self._log_factor + local) + extra_s
        if self.known:
            self._errors.append(abs(expected - seconds) / seconds)
        residual = math.log(seconds / expected)
        if self._first is not None:
            self._first.append(residual + self._log_factor)
            self._log_factor = float(np.median(self._first))
            if len(self._first) >= _WARM:
                self._first = None
        else:
            cut = _CUT * self._usual
            self._usual = min(max(0.95 * self._usual + 0.05 * min(abs(residual), 4.0 * cut), 0.01), 1.0)
            residual = min(max(residual, -cut), cut)
            rate = max(1.0 / (self._weight + 1.0), _FLOOR)
            self._log_factor += rate * residual
            residual -= rate * residual
            for knot, share in ((low, 1.0 - right), (high, right)):
                if share > 0.0:
                    rate = max(1.0 / (self._local_weight[knot] + 1.0), _FLOOR)
                    self._local[knot] += rate * share * residual
                    self._local_weight[knot] += share
        self._weight += 1.0
        self._age += 1
        if self._age >= _STALE or not self.known or self._weight < 2 * _STALE:
            self._refresh()
        self.known = True
        return True

    def _grow(self, size: int) -> None:
        """Extend the table to `size`; beyond the last measured size the mean slope of the curve goes on."""
        size = max(size, 2 * len(self._base), 64)
        at = np.arange(1, size + 1, dtype=np.float64)
        base = np.interp(at, self._sizes, self._seconds)
        beyond = at > self._sizes[-1]
        if beyond.any() and len(self._sizes) > 1:
            slope = (self._seconds[-1] - self._seconds[0]) / (self._sizes[-1] - self._sizes[0])
            base = np.where(beyond, self._seconds[-1] + max(slope, 0.0) * (at - self._sizes[-1]), base)
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
        self._age = 0
