"""The last labels of every draft position, how well they were foreseen, whether the traffic has changed."""

from __future__ import annotations

import numpy as np

from dspark.errors import ConfigError
from dspark.scheduling.interface import Float64, Int64

__all__ = ["LabelWindow"]

NUM_BINS = 15

_CAPACITY = 1024  # labels kept per position
_HALF_LIFE = 512.0  # labels after which one counts half
_HALF_LIFE_STEPS = 4000.0  # likewise in steps, for positions that are rarely seen
_FORGET = 1.0 / 2000.0  # share of the measured error that one more label replaces
_FIT_SHARE = 0.12  # refit when this share of what is kept is new
_FIT_LEAST = 24  # labels
_GROUP = 64  # labels of one look for drift
_SLACK, _ALARM = 1.0, 6.0  # of the cumulative sums, in standard deviations
_CALM = 512  # labels before drift is looked for
_SAVED = 256  # labels per position that go into a saved state
_POOLED = 1024  # newest labels that the map common to all positions is fitted to, evenly from all
_COLUMNS = 4


class LabelWindow:
    """Ring buffers [G, W] of features, labels and the steps they came from.

    Arguments:
        block_size: G.
    """

    def __init__(self, block_size: int) -> None:
        self._data = np.zeros((_COLUMNS, block_size, _CAPACITY))  # low, high, label, step
        self.count: Int64 = np.zeros(block_size, np.int64)  # labels ever taken
        self._oldest = 0  # labels of earlier steps are forgotten
        self._step = 0  # the newest
        self._fresh = 0
        self.bin_forecast = np.zeros((block_size, NUM_BINS))
        self.bin_label = np.zeros((block_size, NUM_BINS))
        self.bin_weight = np.zeros((block_size, NUM_BINS))
        self._group = np.zeros((2, 3))  # [low and high forecasts, (sum of misses, of their variance, number)]
        self._group_step = [0, 0]  # where the group began
        self._sums = np.zeros((2, 2))  # cumulative sums, [group, above and below]
        self._rise = np.zeros((2, 2), np.int64)  # step at which each was last 0

    @property
    def wants_fit(self) -> bool:
        kept = np.minimum(self.count, _CAPACITY).sum()
        return self._fresh >= max(_FIT_LEAST, _FIT_SHARE * float(kept))

    def push(
        self, position: Int64, low: Float64, high: Float64, label: Float64, forecast: Float64, *, step: int
    ) -> bool:
        """Take n labels.

        Arguments:
            position: [n] from 0, ascending.
            low, high: [n] features.
            label: [n] in [0, 1].
            forecast: [n] made before the labels were known.
            step: number of the step they came from, never falling.

        Returns:
            True when the traffic was found to have changed; what is older than the change is then forgotten.
        """
        num_positions = len(self.count)
        added = np.bincount(position, minlength=num_positions)
        rank = np.arange(len(position)) - (np.cumsum(added) - added)[position]
        slot = (self.count[position] + rank) % _CAPACITY
        for column, values in enumerate((low, high, label, step)):
            self._data[column, position, slot] = values
        self.count += added
        self._fresh += len(position)
        self._step = step
        self._measure(position, label, forecast, added)
        changed_at = self._drift(label, forecast)
        if changed_at is None:
            return False
        self._oldest = max(self._oldest, changed_at)
        self._fresh = self._data[0].size  # fit at once
        for bins in (self.bin_forecast, self.bin_label, self.bin_weight):
            bins *= 0.02
        return True

    def recent(self) -> tuple[Float64, Float64, Float64, Float64]:
        """Return low, high, label and weight [G, w] of all kept labels; the weight of a gap is 0."""
        self._fresh = 0
        width = int(min(self.count.max(), _CAPACITY))
        age = (self.count[:, None] - 1 - np.arange(width)) % _CAPACITY
        low, high, label, step = self._data[:, :, :width]
        valid = (age < np.minimum(self.count, _CAPACITY)[:, None]) & (step >= self._oldest)
        weight = np.exp2(-age / _HALF_LIFE - (self._step - step) / _HALF_LIFE_STEPS)
        return low, high, label, np.where(valid, weight, 0.0)

    def pooled(self) -> tuple[Float64, Float64, Float64, Float64]:
        """Return the newest few labels of all positions together, [1, n] each as `recent`."""
        kept = np.arange(_POOLED // max(int(np.count_nonzero(self.count)), 1))
        slot = (self.count[:, None] - 1 - kept) % _CAPACITY
        low, high, label, step = np.take_along_axis(self._data, slot[None], axis=2)
        valid = (kept < self.count[:, None]) & (step >= self._oldest)
        weight = np.where(valid, np.exp2(-(self._step - step) / _HALF_LIFE_STEPS), 0.0)
        return low.reshape(1, -1), high.reshape(1, -1), label.reshape(1, -1), weight.reshape(1, -1)

    def _measure(self, position: Int64, label: Float64, forecast: Float64, added: Int64) -> None:
        fade = ((1.0 - _FORGET) ** added)[:, None]
        cell = position * NUM_BINS + np.minimum((forecast * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        shape, size = self.bin_weight.shape, self.bin_weight.size
        self.bin_forecast = fade * self.bin_forecast + np.bincount(cell, forecast, size).reshape(shape)
        self.bin_label = fade * self.bin_label + np.bincount(cell, label, size).reshape(shape)
        self.bin_weight = fade * self.bin_weight + np.bincount(cell, minlength=size).reshape(shape)

    def _drift(self, label: Float64, forecast: Float64) -> int | None:
        """Return the step at which the traffic changed, None when it did not.

        Cumulative sums of standardised misses, apart for low and high forecasts, in both directions. The
        change is dated back to where the sum that gave the alarm began to rise.
        """
        miss = label - forecast
        spread = np.maximum(miss * miss, forecast * (1.0 - forecast))
        changed_at = None
        for group, mine in enumerate((forecast < 0.7, forecast >= 0.7)):
            number = np.count_nonzero(mine)
            if not number:
                continue
            if not self._group[group, 2]:
                self._group_step[group] = self._step
            self._group[group] += (miss[mine].sum(), spread[mine].sum(), number)
            total, variance, seen = self._group[group]
            if seen < _GROUP:
                continue
            score = total / np.sqrt(variance + 1e-9)
            self._group[group] = 0.0
            if int(self.count.sum()) < _CALM:
                continue
            sums = self._sums[group]
            self._rise[group, sums == 0.0] = self._group_step[group]
            sums[:] = np.maximum(sums + np.array([score, -score]) - _SLACK, 0.0)
            if sums.max() > _ALARM:
                changed_at = int(self._rise[group, int(sums.argmax())])
        if changed_at is not None:
            self._sums[:] = 0.0
            self._group[:] = 0.0
        return changed_at

    # -- state ---------------------------------------------------------------------------------------------

    def state(self) -> list[list[list[float]]]:
        """Return the newest labels of each position, oldest first, as [low, high, label] lists."""
        out = []
        for k, count in enumerate(self.count):
            slots = np.arange(max(int(count) - _SAVED, 0), int(count)) % _CAPACITY
            slots = slots[self._data[3, k, slots] >= self._oldest]
            out.append(np.round(self._data[:3, k, slots], 5).tolist())
        return out

    def restore(self, state: object) -> None:
        """Take what `state` gave.

        Raises:
            ConfigError: other shapes, or labels outside [0, 1].
        """
        if not isinstance(state, list) or len(state) != len(self.count):
            raise ConfigError(
                f"window: got {type(state).__name__}, allowed is a list of {len(self.count)} positions"
            )
        for k, columns in enumerate(state):
            data = np.asarray(columns, np.float64)
            if data.ndim != 2 or len(data) != 3 or data.shape[1] > _CAPACITY:
                raise ConfigError(f"window[{k}]: got shape {data.shape}, allowed is [3, at most {_CAPACITY}]")
            if not np.all(np.isfinite(data)) or np.any(data[2] < 0.0) or np.any(data[2] > 1.0):
                raise ConfigError(f"window[{k}]: allowed are finite features and labels in [0, 1]")
            self._data[:3, k, : data.shape[1]] = data
            self.count[k] = data.shape[1]
