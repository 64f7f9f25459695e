"""Calibration that learns while serving: from confidence logits to probabilities that come true.

One map per draft position, and apart for requests that are greedy, judged by rejection, or coupled to their seed: under
each of the three rules the same draft is accepted with another probability.

    x = z / T_k + s_k,    c_k = sigmoid(-a * softplus(-x) + b * softplus(x) + d),    a, b > 0

With a = b = 1 and d = 0 this is the offline fit (sequential temperature scaling, greedy requests by themselves); a and
b bend the two ends, so the map stays monotone in the logit whatever is learnt. The three numbers are the most likely
ones given the last labels of the position, older ones counting less, and a prior that is worth a few dozen labels and
holds the map at the offline fit while there are no more.

What is fitted is P(x_k accepted | x_1..x_{k-1} accepted, z_k), so a position that was cut off is simply
missing. How that was decided (lengths, loads) does not matter, since it depended on the logits alone.

No engine, no torch, no clock, no random numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark.calibration.label_window import LabelWindow
from dspark.errors import ConfigError
from dspark.scheduling.interface import Bool, Float32, Float64, Kinds

__all__ = ["FORMAT_VERSION", "OnlineCalibrator"]

FORMAT_VERSION = 2  # 2 added shifts and temperatures of greedy requests; a state of version 1 has none
_MODES = ("greedy", "sampled", "coupled")  # by the numbers of `interface`: GREEDY, REJECTION, COUPLED

_RIDGE = 0.5 * np.eye(3) + 0.5 * np.array([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
_OFFLINE_LABELS = 16.0  # labels that the offline fit is worth to the common map
_COMMON_LABELS = 200.0  # labels that the common map is worth to a position
_AT_PRIOR = np.array([1.0, 1.0, 0.0])  # a, b, d of the offline fit
_LOWEST_SLOPE = 0.02
_FARTHEST = 30.0  # |z / T| beyond which nothing changes any more
_LEAST = math.log1p(math.exp(-_FARTHEST))  # softplus there
_LONGEST_STEP = 1.0
_ROWS = 32  # sequences of one step that are learnt from; the others are left out in turn
_BATCH_ROWS, _BATCH_STEPS = 32, 16  # what is gathered before it is learnt from
_STARVED = 256  # steps without a label after which a position is starved


class OnlineCalibrator:
    """Learns from every step; see the module's text. Implements `scheduling.interface.Calibrator`.

    Arguments:
        block_size: G.
        temperatures: [G] of the offline fit; None = 1 everywhere.
        greedy_temperatures: [G] of the offline fit of greedy requests; None = `temperatures`.
        shifts, greedy_shifts: [G] s_k of the same fits; None = 0.
    """

    def __init__(
        self,
        *,
        block_size: int,
        temperatures: Sequence[float] | None = None,
        greedy_temperatures: Sequence[float] | None = None,
        shifts: Sequence[float] | None = None,
        greedy_shifts: Sequence[float] | None = None,
    ) -> None:
        self.block_size = block_size
        drawn = _checked("temperatures", temperatures, block_size, absent=1.0, above=0.0)
        greedy = drawn
        if greedy_temperatures is not None:
            greedy = _checked("greedy_temperatures", greedy_temperatures, block_size, absent=1.0, above=0.0)
        self.temperatures, self.greedy_temperatures = drawn, greedy
        self._scale = 1.0 / np.stack([greedy, drawn, drawn])  # [3, G]
        of_drawn = _checked("shifts", shifts, block_size, absent=0.0)
        of_greedy = _checked("greedy_shifts", greedy_shifts, block_size, absent=0.0)
        self._shift = np.stack([of_greedy, of_drawn, of_drawn])
        self._windows = tuple(LabelWindow(block_size) for _ in _MODES)
        self._common = np.tile(_AT_PRIOR, (len(_MODES), 1, 1))  # [3, 1, 3]
        self._params: Float64 = np.tile(_AT_PRIOR, (len(_MODES), block_size, 1))  # [3, G, 3]
        # mode -> scale, shift, a, b, d of one position after the other; packed, since these are read behind passes
        # that emptied the caches
        self._plain: dict[int, array[float]] = {}
        self._silence = np.zeros(block_size, np.int64)  # steps since the last label
        self._first_row = 0
        self._num_steps = 0
        self._gathered: list[tuple[Float32, Float64, Kinds, Bool]] = []
        self._num_gathered = self._num_new_steps = 0
        self.num_drifts = 0
        self.num_excluded = 0  # labels left out: altered requests, logits that are not finite

    # -- forecasts -----------------------------------------------------------------------------------------

    def confidence(self, logits: Float32, *, sampled: Kinds) -> Float64:
        """Return c_k [R, G] for logits [R, G]; NaN for a logit that is not finite."""
        low, high = self._features(logits, sampled)
        params = self._of_rows(self._params, sampled)
        score = params[..., 0] * low - params[..., 1] * high - params[..., 2]
        return np.asarray(1.0 / (1.0 + np.exp(score)))

    def confidence_of_one(self, logits: Sequence[float], *, sampled: int) -> list[float]:
        """Return what `confidence` gives for one sequence, up to the first logit that is not finite.

        Plain numbers: for one block a dozen array calls cost several times as much.
        """
        packed = self._plain.get(sampled)
        if packed is None:
            mode = int(sampled)
            columns = np.column_stack([self._scale[mode], self._shift[mode], self._params[mode]])
            packed = self._plain[sampled] = array("d", columns.ravel().tolist())
        numbers = iter(packed.tolist())
        out = []
        exp, log1p = math.exp, math.log1p
        for logit, scale, shift, a, b, d in zip(
            logits, numbers, numbers, numbers, numbers, numbers, strict=False
        ):
            if logit - logit != 0.0:  # not finite
                break
            x = logit * scale + shift
            if x > 0.0:  # high = softplus(x), low = softplus(-x)
                low = log1p(exp(-x)) if x < _FARTHEST else _LEAST
                high = low + (x if x < _FARTHEST else _FARTHEST)
            else:
                high = log1p(exp(x)) if x > -_FARTHEST else _LEAST
                low = high - (x if x > -_FARTHEST else -_FARTHEST)
            out.append(1.0 / (1.0 + exp(a * low - b * high - d)))
        return out

    def maps(self) -> Float32:
        """Return scale, shift, a, b, d of every kind and position [3, G, 5]: what a device needs for `confidence`."""
        start = np.stack([self._scale, self._shift], axis=-1)
        maps: Float32 = np.concatenate([start, self._params], axis=-1).astype(np.float32)
        return maps

    def parameters(self, *, sampled: int) -> Float64:
        """Return a, b, d of every position [G, 3] for one kind of traffic."""
        self.flush()
        return np.array(self._params[int(sampled)])

    def ece(self, *, sampled: int | None = None) -> Float64:
        """Return the expected calibration error of each position [G] over recent labels; NaN with none.

        Every forecast was made before its label was known. `sampled` None joins all kinds of traffic.
        """
        self.flush()
        windows = self._windows if sampled is None else (self._windows[int(sampled)],)
        gap = np.abs(sum(w.bin_forecast - w.bin_label for w in windows)).sum(axis=1)
        weight = np.asarray(sum(w.bin_weight for w in windows)).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(weight > 0.0, gap / weight, np.nan))

    @property
    def num_labels(self) -> int:
        """Labels learnt from, over all positions."""
        self.flush()
        return int(sum(w.count.sum() for w in self._windows))

    def deepest_starved(self) -> int:
        """Return the deepest position (from 1) that has shown nothing for long, 0 when there is none."""
        starved = np.flatnonzero(self._silence > _STARVED)
        return int(starved[-1]) + 1 if len(starved) else 0

    # -- learning ------------------------------------------------------------------------------------------

    def observe(
        self, logits: Float32, labels: Float64, *, sampled: Kinds, usable: Bool, num_steps: int = 1
    ) -> None:
        """Take what a step showed, or some steps.

        Arguments:
            logits: [R, G].
            labels: [R, G] in [0, 1], NaN = unknown.
            sampled: [R] kind of traffic.
            usable: [R] False = leave this sequence out (altered logits, nothing drafted).
            num_steps: that these rows are of.
        """
        if len(logits) > _ROWS * num_steps:
            num = _ROWS * num_steps
            chosen = (self._first_row + np.arange(num)) % len(logits)
            self._first_row = (self._first_row + num) % len(logits)
            logits, labels = logits[chosen], labels[chosen]
            sampled, usable = sampled[chosen], usable[chosen]
        self._gathered.append((logits, labels, sampled, usable))
        self._num_gathered += len(logits)
        self._num_new_steps += num_steps
        if self._num_gathered >= _BATCH_ROWS or self._num_new_steps >= _BATCH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Learn now from what was gathered; called by itself every few steps."""
        if not self._gathered:
            return
        logits, labels, sampled, usable = (np.concatenate(part) for part in zip(*self._gathered, strict=True))
        self._num_steps += self._num_new_steps
        self._silence += self._num_new_steps
        self._gathered.clear()
        self._num_gathered = self._num_new_steps = 0
        known = ~np.isnan(labels)
        taken = known & np.isfinite(logits) & usable[:, None]
        self.num_excluded += int(known.sum()) - int(taken.sum())
        self._silence[taken.any(axis=0)] = 0
        for mode, window in enumerate(self._windows):
            mine = taken & (sampled == mode)[:, None]
            position, row = np.nonzero(mine.T)
            if not len(position):
                continue
            x = logits[row, position].astype(np.float64) * self._scale[mode, position]
            low, high = self._features_at(x + self._shift[mode, position])
            label = labels[row, position]
            params = self._params[mode][position]
            score = params[:, 1] * high - params[:, 0] * low + params[:, 2]
            forecast = 1.0 / (1.0 + np.exp(-score))
            self.num_drifts += window.push(position, low, high, label, forecast, step=self._num_steps)
            if window.wants_fit:
                self._fit(mode, window)

    def _fit(self, mode: int, window: LabelWindow) -> None:
        """Fit the common map, held to the offline fit, then every position, held to the common map."""
        common, pooled = self._common[mode], window.pooled()
        information = _information(*pooled, common)[0]
        precision = _OFFLINE_LABELS * information + _RIDGE
        common = _most_likely(*pooled, start=common, prior=_AT_PRIOR, precision=precision)
        precision = _COMMON_LABELS * information + _RIDGE
        self._common[mode] = common
        self._plain.pop(mode, None)
        self._params[mode] = _most_likely(
            *window.recent(), start=self._params[mode], prior=common, precision=precision
        )

    @staticmethod
    def _of_rows(of_modes: Float64, sampled: Kinds) -> Float64:
        """Return what each sequence's mode has of [3, G, ...], [1 or R, G, ...]."""
        kinds = sampled.astype(np.int64)
        first = int(kinds[0]) if len(kinds) else 0
        if (kinds == first).all():
            return np.asarray(of_modes[first : first + 1])
        return np.asarray(of_modes[kinds])

    def _features(self, logits: Float32, sampled: Kinds) -> tuple[Float64, Float64]:
        x = logits.astype(np.float64)
        x[~np.isfinite(x)] = np.nan
        return self._features_at(
            x * self._of_rows(self._scale, sampled) + self._of_rows(self._shift, sampled)
        )

    @staticmethod
    def _features_at(x: Float64) -> tuple[Float64, Float64]:
        """Return softplus(-x) and softplus(x)."""
        x = np.minimum(np.maximum(x, -_FARTHEST), _FARTHEST)
        high = np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x)))
        return high - x, high

    # -- state ---------------------------------------------------------------------------------------------

    def state(self, *, made_for: str = "") -> dict[str, Any]:
        """Return all that was learnt, as JSON values.

        Arguments:
            made_for: hash of the drafter whose confidences these are.
        """
        self.flush()
        return {
            "format_version": FORMAT_VERSION,
            "made_for": made_for,
            "block_size": self.block_size,
            "temperatures": self.temperatures.tolist(),
            "greedy_temperatures": self.greedy_temperatures.tolist(),
            "shifts": self._shift[1].tolist(),
            "greedy_shifts": self._shift[0].tolist(),
            "num_drifts": self.num_drifts,
            "common": self._common[:, 0].tolist(),
            "modes": {
                name: {"parameters": self._params[mode].tolist(), "window": self._windows[mode].state()}
                for mode, name in enumerate(_MODES)
            },
        }

    @classmethod
    def restore(cls, state: object, *, block_size: int, made_for: str = "") -> OnlineCalibrator:
        """Return a calibrator with the state that `state` gave.

        Raises:
            ConfigError: another format version, block size or drafter (naming both), or values out of range.
        """
        if not isinstance(state, dict):
            raise ConfigError(f"calibration state: got {type(state).__name__}, allowed is an object")
        for name, expected in (
            ("format_version", FORMAT_VERSION),
            ("made_for", made_for),
            ("block_size", block_size),
        ):
            known = (1, FORMAT_VERSION) if name == "format_version" else (expected,)
            if state.get(name) not in known:
                raise ConfigError(
                    f"calibration state: {name} is {state.get(name)!r} there and {expected!r} here"
                )
        try:
            calibrator = cls(
                block_size=block_size,
                temperatures=state["temperatures"],
                greedy_temperatures=state.get("greedy_temperatures"),
                shifts=state.get("shifts"),
                greedy_shifts=state.get("greedy_shifts"),
            )
            calibrator.num_drifts = int(state["num_drifts"])
            names = [
                name for name in _MODES if name in state["modes"] or name != "coupled"
            ]  # once there were two
            calibrator._common[: len(names), 0] = _finite_slopes("common", state["common"], (len(names), 3))
            for mode, name in enumerate(names):
                saved = state["modes"][name]
                calibrator._params[mode] = _finite_slopes(name, saved["parameters"], (block_size, 3))
                calibrator._windows[mode].restore(saved["window"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"calibration state: {error!r}") from error
        return calibrator


def _checked(
    name: str, values: Sequence[float] | None, block_size: int, *, absent: float, above: float = -math.inf
) -> Float64:
    """Return an offline fit's numbers [G], `absent` everywhere for None."""
    given = np.full(block_size, absent) if values is None else np.asarray(values, np.float64)
    if given.shape != (block_size,) or not np.all(np.isfinite(given)) or not np.all(given > above):
        bound = f" > {above:g}" if above > -math.inf else ""
        raise ConfigError(
            f"{name}: got {np.asarray(values).tolist()!r}, allowed are {block_size} finite numbers{bound}"
        )
    return given


def _finite_slopes(name: str, values: object, shape: tuple[int, int]) -> Float64:
    params = np.asarray(values, np.float64)
    if params.shape != shape or not np.all(np.isfinite(params)) or np.any(params[:, :2] <= 0.0):
        raise ConfigError(f"calibration state: {name}: allowed are {shape} finite numbers, slopes above 0")
    return params


def _information(low: Float64, high: Float64, _: Float64, weight: Float64, params: Float64) -> Float64:
    """Return what one label tells of a, b, d on average [G, 3, 3]."""
    score = params[:, 1:2] * high - params[:, 0:1] * low + params[:, 2:3]
    forecast = 1.0 / (1.0 + np.exp(-score))
    hessian = _hessian(low, high, weight * forecast * (1.0 - forecast))
    return np.asarray(hessian / np.maximum(weight.sum(axis=1), 1.0)[:, None, None])


def _hessian(low: Float64, high: Float64, curve: Float64) -> Float64:
    low_c, high_c = curve * low, curve * high
    hessian = np.empty((len(low), 3, 3))
    hessian[:, 0, 0] = (low_c * low).sum(1)
    hessian[:, 0, 1] = hessian[:, 1, 0] = -(low_c * high).sum(1)
    hessian[:, 0, 2] = hessian[:, 2, 0] = -low_c.sum(1)
    hessian[:, 1, 1] = (high_c * high).sum(1)
    hessian[:, 1, 2] = hessian[:, 2, 1] = high_c.sum(1)
    hessian[:, 2, 2] = curve.sum(1)
    return hessian


def _most_likely(
    low: Float64,
    high: Float64,
    label: Float64,
    weight: Float64,
    *,
    start: Float64,
    prior: Float64,
    precision: Float64,
) -> Float64:
    """Return a, b, d [G, 3] of the highest posterior, by a few damped Newton steps from `start`.

    Arguments:
        low, high, label, weight: [G, w] labels of each position.
        start: [G, 3].
        prior: [3] or [G, 3] centre of the Gaussian prior.
        precision: [3, 3] of that prior.
    """
    params = start
    for _ in range(3):
        score = params[:, 1:2] * high - params[:, 0:1] * low + params[:, 2:3]
        forecast = 1.0 / (1.0 + np.exp(-score))
        miss = weight * (label - forecast)
        curve = weight * np.maximum(forecast * (1.0 - forecast), 1e-4)
        gradient = np.stack([-(miss * low).sum(1), (miss * high).sum(1), miss.sum(1)], axis=1)
        gradient -= (params - prior) @ precision
        hessian = _hessian(low, high, curve)
        step = np.linalg.solve(hessian + precision, gradient[:, :, None])[:, :, 0]
        largest = np.abs(step).max(axis=1, keepdims=True)
        step *= np.minimum(1.0, _LONGEST_STEP / np.maximum(largest, 1e-12))
        params = params + step
        params[:, :2] = np.maximum(params[:, :2], _LOWEST_SLOPE)
        if float(largest.max()) < 0.02:
            break
    return params
