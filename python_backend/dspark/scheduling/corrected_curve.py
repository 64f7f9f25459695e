"""One cost curve over sizes, corrected by observation.

    seconds(size, tokens) = factor * (curve(size) * exp(local(size)) + known) + token_s * tokens

`known` is what was measured for the cached tokens of the pass, `token_s` what serving finds they take beyond that. The
measured shape, cliffs and all, stays; what moves is its height: first everywhere (`factor`, together with `token_s`, by
least squares that forget), then near the sizes that are seen (`local`). One slow step (another process, a page fault)
moves little: residuals are cut at a few times their usual size. Steps are taken several at a time and in plain numbers:
a dozen of them cost less than the first few array calls behind a pass that emptied the caches.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

__all__ = ["CorrectedCurve", "Float64"]

Float64 = npt.NDArray[np.float64]

_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 16384)
_LOG_KNOTS = np.log(_KNOTS)
_LOG_KNOT = tuple(math.log(knot) for knot in _KNOTS)
_LOCAL_MOST = 33.0  # steps that the local part remembers
_FORGET = 0.0036  # variance that the height gains with every step, in those of one residual
_TOKEN_FORGET = 1e-5  # likewise of `token_s`, in units of its first uncertainty
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
        self._local = [0.0] * len(_KNOTS)
        self._unseen_weight = prior_weight + 1.0
        self._local_weight = [self._unseen_weight] * len(_KNOTS)
        self._usual = _USUAL
        self._first: list[float] | None = None if self.known else []
        self._token_spread = _TOKEN_SPREAD * _TOKEN_UNIT * float(self._seconds[0])
        # variances of log factor and of token_s, and what they share
        self._variance = (_USUAL**2 / max(prior_weight, 1.0), self._token_spread**2, 0.0)
        self._errors: deque[float] = deque(maxlen=129)
        self._base = np.zeros(0)  # [B] base seconds at 1, 2, ...
        self._log_sizes = np.zeros(0)  # [B]
        self._table = np.zeros(0)  # [B] corrected
        self._stale = False  # the table is of an earlier time
        self.version = 0  # rises whenever the seconds change

    @property
    def factor(self) -> float:
        """How much slower than the curve this machine is now, over all sizes."""
        return math.exp(self._log_factor)

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
        factor, local, base = self.factor, self._local, self._base
        expected, residuals, slopes, places = [], [], [], []
        for size, took, cached, known in zip(sizes, seconds, tokens, known_s, strict=True):
            low = bisect_right(_KNOTS, size) - 1
            high = min(low + 1, len(_KNOTS) - 1)
            right = (
                (math.log(size) - _LOG_KNOT[low]) / (_LOG_KNOT[high] - _LOG_KNOT[low]) if high > low else 0.0
            )
            here = (1.0 - right) * local[low] + right * local[high]
            in_proportion = factor * (float(base[size - 1]) * math.exp(here) + known)
            hoped = max(in_proportion + self.token_s * cached, 0.1 * in_proportion)
            expected.append(hoped)
            residuals.append(math.log(took / hoped))
            slopes.append((in_proportion / hoped, cached / hoped))
            places.append((low, high, right))
        if self.known:
            self._errors.extend(abs(e - s) / s for e, s in zip(expected, seconds, strict=True))
        if self._first is not None:
            self._first.extend(r + self._log_factor for r in residuals)
            self._log_factor = median(self._first)
            if len(self._first) >= _WARM:
                self._first = None
        else:
            residuals = self._learn_height(self._cut(residuals), slopes)
            self._learn_local(residuals, places)
        self.known = self._stale = True
        self.version += 1
        return expected

    def _cut(self, residuals: list[float]) -> list[float]:
        """Return the residuals cut at a few usual ones, and learn what is usual.

        What most of a few steps in a row have in common is no slow step but another machine: it is not cut, and the
        height may follow at once.
        """
        common = median(residuals) if len(residuals) >= _SPELL else 0.0
        cut = _CUT * self._usual
        if abs(common) > self._usual:
            height, token, both = self._variance
            self._variance = (height + common**2, token, both)
        else:
            common = 0.0
        kept = []
        for residual in residuals:
            rest = residual - common
            self._usual += 0.05 * (min(abs(rest), 4.0 * cut) - self._usual)
            kept.append(common + min(max(rest, -cut), cut))
        self._usual = min(max(self._usual, 0.01), 1.0)
        return kept

    def _learn_height(self, residuals: list[float], slopes: list[tuple[float, float]]) -> list[float]:
        """Move factor and token_s; return what is left of the residuals.

        Arguments:
            slopes: of the logarithm of the expected seconds, by log factor and by token_s.
        """
        num, noise = len(residuals), self._usual**2
        height, token, both = self._variance
        height += _FORGET * noise * num
        token = min(token + _TOKEN_FORGET * self._token_spread**2 * num, self._token_spread**2)
        # Bayes in precisions: that of before and those of the steps add up.
        scale = height * token - both * both
        a, b, c = token / scale, height / scale, -both / scale
        right_height = right_token = 0.0
        for residual, (share, per_token) in zip(residuals, slopes, strict=True):
            a += share * share / noise
            b += per_token * per_token / noise
            c += share * per_token / noise
            right_height += share * residual / noise
            right_token += per_token * residual / noise
        scale = a * b - c * c
        height, token, both = b / scale, a / scale, -c / scale
        step, token_step = (
            height * right_height + both * right_token,
            both * right_height + token * right_token,
        )
        self._variance = (height, token, both)
        self._log_factor += step
        self.token_s += token_step
        return [
            residual - share * step - per_token * token_step
            for residual, (share, per_token) in zip(residuals, slopes, strict=True)
        ]

    def _learn_local(self, residuals: list[float], places: list[tuple[int, int, float]]) -> None:
        moved: dict[int, tuple[float, float]] = {}  # knot -> what it is moved by, how often it was seen
        for residual, (low, high, right) in zip(residuals, places, strict=True):
            for knot, share in ((low, 1.0 - right), (high, right)):
                if share > 0.0:
                    total, seen = moved.get(knot, (0.0, 0.0))
                    moved[knot] = (total + share * residual, seen + share)
        for knot, (total, seen) in moved.items():
            self._local[knot] += total / (min(self._local_weight[knot], _LOCAL_MOST) + seen)
            self._local_weight[knot] += seen

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
        self._stale = True

    def _refresh(self) -> None:
        seen = np.array(self._local_weight) > self._unseen_weight
        local = np.array(self._local)
        if seen.any():  # sizes never seen go the way of their nearest neighbours that were
            local = np.interp(_LOG_KNOTS, _LOG_KNOTS[seen], local[seen])
            self._local = local.tolist()
        table = self._base * np.exp(self._log_factor + np.interp(self._log_sizes, _LOG_KNOTS, local))
        # More rows never cost less: half way between the lowest curve above the table and the highest below it.
        above = np.maximum.accumulate(table)
        below = np.minimum.accumulate(table[::-1])[::-1]
        self._table = 0.5 * (above + below)
        self._table.flags.writeable = False
        self._stale = False
