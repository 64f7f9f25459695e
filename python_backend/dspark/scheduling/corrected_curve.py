"""One cost curve over sizes, corrected by observation.

    seconds(size, tokens) = factor * (curve(size) * exp(shape(size)) + known) + token_s * tokens

`known` is what was measured for the cached tokens of the pass, `token_s` what serving finds they take beyond that. The
measured curve stays, cliffs and all; factor, shape and token_s are what `curve_filter` believes. Steps are taken some
at a time: the first few array calls behind a pass that emptied the caches cost more than a dozen steps in them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from dspark.scheduling.curve_filter import CurveFilter, Float64, knot_weights

__all__ = ["CorrectedCurve", "Float64"]

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
        self._belief = CurveFilter(prior_weight=prior_weight, smallest_s=float(self._seconds[0]))
        self._first: list[float] | None = None if self.known else []
        self._errors: deque[float] = deque(maxlen=129)
        self._base = np.zeros(0)  # [B] base seconds at 1, 2, ...
        self._weights = np.zeros((0, 0))  # [B, K] of the knots at these sizes
        self._table = np.zeros(0)  # [B] corrected
        self._stale = False  # the table is of an earlier time
        self.version = 0  # rises whenever the seconds change

    @property
    def factor(self) -> float:
        """How much slower than the curve this machine is now, over all sizes."""
        return math.exp(self._belief.log_height)

    @property
    def token_s(self) -> float:
        """Seconds of a cached token, beyond what was measured for it."""
        return self._belief.token_s

    @property
    def error(self) -> float:
        """Median relative error of the last predictions; 0 with none."""
        return median(self._errors) if self._errors else 0.0

    def seconds(self, first: int, count: int) -> Float64:
        """Return the seconds at first .. first+count-1 without cached tokens, float64 [count]. Not to be written to."""
        end = first - 1 + count
        if end > len(self._base):
            self._grow(end)
        if self._stale:
            self._refresh()
        return self._table[first - 1 : end]

    def ratio_error(self, size: int, larger: int) -> float:
        """Return by how much, relative, the seconds of `larger` over those of `size` may be off: one deviation."""
        if larger > len(self._base):
            self._grow(larger)
        return self._belief.uncertainty(self._weights[larger - 1] - self._weights[size - 1])

    def observe(
        self,
        sizes: Sequence[int],
        seconds: Sequence[float],
        *,
        tokens: Sequence[float],
        known_s: Sequence[float],
    ) -> list[float]:
        """Take the times of some steps and return what each had been expected to take.

        Arguments:
            sizes: n of them, >= 1.
            seconds: finite and > 0.
            tokens: cached tokens.
            known_s: what was measured for them, before the factor.
        """
        if max(sizes) > len(self._base):
            self._grow(max(sizes))
        at = np.array(sizes, np.int64) - 1
        cached, weights = np.array(tokens, np.float64), self._weights[at]
        curve_s = self._base[at] * np.exp(self._belief.log_height + weights @ self._belief.shape)
        in_proportion = curve_s + self.factor * np.array(known_s, np.float64)
        hoped = np.maximum(in_proportion + self.token_s * cached, 0.1 * in_proportion)
        residuals = np.log(np.array(seconds, np.float64) / hoped)
        expected: list[float] = hoped.tolist()
        if self.known:
            self._errors.extend(abs(e - s) / s for e, s in zip(expected, seconds, strict=True))
        if self._first is not None:
            self._first.extend((residuals + self._belief.log_height).tolist())
            self._belief.log_height = median(self._first)
            if len(self._first) >= _WARM:
                self._first = None
        else:
            self._belief.observe(
                residuals,
                by_height=in_proportion / hoped,
                by_token=cached / hoped,
                by_shape=weights * (curve_s / hoped)[:, None],
            )
        self.known = self._stale = True
        self.version += 1
        return expected

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
        self._weights = knot_weights(np.log(at))
        self._stale = True

    def _refresh(self) -> None:
        table = self._base * np.exp(self._belief.log_height + self._weights @ self._belief.shape)
        # More rows never cost less: half way between the lowest curve above the table and the highest below it.
        above = np.maximum.accumulate(table)
        below = np.minimum.accumulate(table[::-1])[::-1]
        self._table = 0.5 * (above + below)
        self._table.flags.writeable = False
        self._stale = False
