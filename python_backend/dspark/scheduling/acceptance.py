"""What earlier steps say about the drafts of a sequence: for drafters without a confidence head, and before
drafting.

Two memories over rows (one row per live sequence, handed out by `SequenceRows`):

    AcceptanceStats   counts of accepted and refused drafts by position, per sequence and over all
    SurvivalMemory    the last calibrated survivals of every sequence, and of all together

Both hold only what is known before the next block is drawn, so no choice made from them can lean on its
tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from dspark.scheduling.interface import Bool, Calibrator, Float32, Float64, Int32, Int64, StepObservation

__all__ = [
    "AcceptanceStats",
    "SequenceRows",
    "SurvivalMemory",
    "acceptance_labels",
    "grown",
    "is_unrated",
    "joined",
    "learn_calibration",
    "survival_beyond",
]


def acceptance_labels(step: StepObservation, *, block_size: int) -> Float64:
    """Return what a step showed of P(x_k accepted | x_1..x_{k-1} accepted), NaN where it showed nothing.

    Position k is known when everything before it was accepted and it was verified, or its exact label is at
    hand. A position that was cut off is unknown, never a failure.

    Returns:
        float64 [R, G] in [0, 1] or NaN.
    """
    at = np.arange(block_size, dtype=np.int32)
    accepted, verified = step.accepted[:, None], step.verify_len[:, None]
    labels = np.where(at < accepted, 1.0, np.where((at == accepted) & (at < verified), 0.0, np.nan))
    if step.soft_labels is not None:
        exact = step.soft_labels.astype(np.float64)
        usable = (at <= accepted) & (at < step.num_drafts[:, None]) & (exact >= 0.0) & (exact <= 1.0)
        labels = np.where(usable, exact, labels)
    return labels


def is_unrated(confidence_logits: Float32, num_drafts: Int32) -> Bool:
    """Return which sequences have drafts that were looked up [R]: their confidence logits [R, G] are NaN."""
    return np.asarray(np.isnan(confidence_logits[:, 0]) & (num_drafts > 0))


def joined(steps: Sequence[StepObservation]) -> StepObservation:
    """Return some steps with confidence logits as one: all that is about drafts, one step after the other [N].

    Times and rows of the pass are those of the last one.
    """
    last = steps[-1]
    if len(steps) == 1:
        return last
    labels = None
    if any(step.soft_labels is not None for step in steps):
        labels = np.concatenate([_soft_labels(step) for step in steps])
    return replace(
        last,
        sequence_ids=np.concatenate([step.sequence_ids for step in steps]),
        num_drafts=np.concatenate([step.num_drafts for step in steps]),
        verify_len=np.concatenate([step.verify_len for step in steps]),
        accepted=np.concatenate([step.accepted for step in steps]),
        sampled=np.concatenate([step.sampled for step in steps]),
        altered=np.concatenate([step.altered for step in steps]),
        confidence_logits=np.concatenate([_logits(step) for step in steps]),
        soft_labels=labels,
    )


def _logits(step: StepObservation) -> Float32:
    assert step.confidence_logits is not None
    return step.confidence_logits


def _soft_labels(step: StepObservation) -> Float32:
    return np.full_like(_logits(step), np.nan) if step.soft_labels is None else step.soft_labels


def learn_calibration(
    calibrator: Calibrator, step: StepObservation, *, block_size: int, num_steps: int = 1
) -> None:
    """Hand a step, or `joined` ones, to the calibrator; drafts that nothing rated have nothing to calibrate."""
    if step.confidence_logits is None or not step.num_drafts.any():
        return
    labels = acceptance_labels(step, block_size=block_size)
    labels[is_unrated(step.confidence_logits, step.num_drafts)] = np.nan
    calibrator.observe(
        step.confidence_logits,
        labels,
        sampled=step.sampled,
        usable=~step.altered & (step.num_drafts > 0),
        num_steps=num_steps,
    )


def survival_beyond(
    survival: list[float], *, num_drafts: int, block_size: int, reach: int | None = None
) -> list[float]:
    """Return survivals [G] of a block, one that was shorter taken to go on behind its end as it did before it.

    A block cut short by its cap says nothing of what lies behind.

    Arguments:
        survival: of its drafts; 0 from where it ends.
        num_drafts: >= 1.
        reach: drafts of the longest block of its kind, 0 behind that; None = block_size.
    """
    whole = (survival + [0.0] * block_size)[:block_size]
    if num_drafts >= block_size:
        return whole
    end = whole[num_drafts - 1]
    mean = end ** (1.0 / num_drafts)
    for k in range(num_drafts, block_size if reach is None else min(reach, block_size)):
        end *= mean
        whole[k] = end
    return whole


class SequenceRows:
    """Gives every live sequence a row of the arrays below; rows of released sequences are used again."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self.num_rows = 0  # highest row ever used + 1

    def rows(self, sequence_ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the row of each sequence [R], and the rows that are new (their state must be reset)."""
        row_of, new = self._row_of, []
        out = []
        for sequence_id in sequence_ids:
            row = row_of.get(sequence_id)
            if row is None:
                row = self._free.pop() if self._free else self.num_rows
                self.num_rows = max(self.num_rows, row + 1)
                row_of[sequence_id] = row
                new.append(row)
            out.append(row)
        return out, new

    def release(self, sequence_id: int) -> None:
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)

    def __len__(self) -> int:
        return len(self._row_of)


def grown(array: Float64, num_rows: int) -> Float64:
    """Return `array` with at least `num_rows` rows, new ones zero."""
    if num_rows <= len(array):
        return array
    more = np.zeros((max(num_rows, 2 * len(array), 16), *array.shape[1:]))
    more[: len(array)] = array
    return more


_NEW, _COLD, _PART, _HOT = range(4)  # how the last known block of a sequence ended


class AcceptanceStats:
    """Conditional acceptance by position, learnt from outcomes.

    Looked-up drafts come in runs: text that repeats goes on repeating. So the estimate of a sequence starts
    from what happened, over all sequences, after a block that ended as its last one did, and is then pulled
    to its own counts. Own counts fade in about ten blocks, those over all in several hundred.
    """

    _OWN_DECAY = 0.9  # per known block of the sequence
    _ALL_DECAY = 0.998  # per step that showed anything
    _PRIOR_FIRST, _PRIOR_LATER = 0.3, 0.6
    _PRIOR_WEIGHT = 4.0
    _PULL = 3.0  # blocks that the estimate over all is worth against own counts

    def __init__(self, block_size: int) -> None:
        prior = np.full(block_size, self._PRIOR_LATER)
        prior[:1] = self._PRIOR_FIRST
        self._all_prior_hits = np.tile(prior * self._PRIOR_WEIGHT, (4, 1))
        self._all_hits = np.zeros((4, block_size))
        self._all_trials = np.zeros((4, block_size))
        self._hits = np.zeros((16, block_size))
        self._trials = np.zeros((16, block_size))
        self._end = np.zeros((16, 4))
        self._end[:, _NEW] = 1.0

    def reset(self, rows: list[int], num_rows: int) -> None:
        """Start anew for sequences that were just given these rows."""
        self._hits = grown(self._hits, num_rows)
        self._trials = grown(self._trials, num_rows)
        self._end = grown(self._end, num_rows)
        self._hits[rows] = 0.0
        self._trials[rows] = 0.0
        self._end[rows] = (1.0, 0.0, 0.0, 0.0)

    def confidence(self, rows: Int64) -> Float64:
        """Return the expected c_k [R, G] of the next block of each sequence."""
        over_all = (self._all_hits + self._all_prior_hits) / (self._all_trials + self._PRIOR_WEIGHT)
        usual = self._end[rows] @ over_all
        return np.asarray((self._hits[rows] + self._PULL * usual) / (self._trials[rows] + self._PULL))

    def observe(self, rows: Int64, labels: Float64) -> None:
        """Take labels [R, G] of `acceptance_labels`."""
        known = ~np.isnan(labels)
        any_known = known.any(axis=1)
        if not any_known.any():
            return
        rows, labels, known = rows[any_known], labels[any_known], known[any_known]
        hits = np.where(known, labels, 0.0)
        end = self._end[rows]
        self._all_hits = self._ALL_DECAY * self._all_hits + end.T @ hits
        self._all_trials = self._ALL_DECAY * self._all_trials + end.T @ known
        self._hits[rows] = self._OWN_DECAY * self._hits[rows] + hits
        self._trials[rows] = self._OWN_DECAY * self._trials[rows] + known
        hot = np.where(known, labels, 1.0).prod(axis=1)  # soft: how likely the whole block was good
        cold = 1.0 - np.where(known[:, 0], labels[:, 0], 1.0)
        end = np.stack([np.zeros(len(rows)), cold, np.maximum(1.0 - hot - cold, 0.0), hot], axis=1)
        self._end[rows] = end / end.sum(axis=1, keepdims=True)


class SurvivalMemory:
    """The last few survivals that a confidence head forecast, as samples of what the next block will be worth.

    Plain lists: most steps add a few blocks, and only a plan looks at them.
    """

    OWN, ALL = 8, 32  # samples kept per sequence, and over all

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._own: list[deque[list[float]]] = []  # by row, the newest last
        self._all: deque[list[float]] = deque(maxlen=self.ALL)
        self.num_all = 0  # ever taken

    def reset(self, rows: list[int], num_rows: int) -> None:
        """Start anew for sequences that were just given these rows."""
        self._own += [deque(maxlen=self.OWN) for _ in range(num_rows - len(self._own))]
        for row in rows:
            self._own[row].clear()

    def observe(self, row: int, survival: list[float]) -> None:
        """Take the survivals [G] of a whole block; of a shorter one what is taken to lie behind its end as well."""
        self._own[row].append(survival)
        self._all.append(survival)
        self.num_all += 1

    def samples(self, rows: list[int], *, num: int = OWN) -> Float64:
        """Return the newest `num` <= OWN samples of each sequence [num, R, G]; missing ones are taken from all."""
        return np.array(self.blocks(rows, num=num), np.float64).transpose(1, 0, 2)

    def blocks(self, rows: list[int], *, num: int = OWN) -> list[list[list[float]]]:
        """Return `samples` as lists, by sequence [R][num][G]. Not to be written to."""
        nothing = [0.0] * self._block_size
        others = itertools.cycle(reversed(self._all)) if self._all else itertools.repeat(nothing)
        columns = []
        for row in rows:
            own = list(self._own[row])[: -num - 1 : -1]
            columns.append(own + [next(others) for _ in range(num - len(own))])
        return columns
