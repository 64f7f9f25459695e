"""The policies that weigh drafts against measured cost: `prefix`, `lagged` and `auto`.

    prefix   early stop over the drafts at hand
    lagged   as many as a full search over the drafts of two steps earlier chose; which ones, the drafts at hand say
    auto     early stop that sees over small cliffs; without a confidence head a full search over what is known of
             each sequence before its block is drawn

All three first decide whether a block is worth drafting (`draft_planner`). What steps show is gathered and learnt from
a few at a time: one step at one request takes 6 ms, and a dozen array calls behind it 0.1.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from dspark.calibration.tree import RATED, BlockCalibrator
from dspark.scheduling.acceptance import (
    AcceptanceStats,
    SequenceRows,
    acceptance_labels,
    grown,
    is_unrated,
    joined,
    learn_calibration,
)
from dspark.scheduling.allocation import (
    best_num,
    early_stop_num,
    lookahead_num,
    rank_candidates,
    survival_of,
    throughput,
    verify_len_of,
)
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.draft_planner import DraftPlanner
from dspark.scheduling.interface import Bool, Calibrator, Float32, Float64, Int, Int32, Kinds, StepObservation
from dspark.scheduling.policy import Policy
from dspark.scheduling.single import early_stop_len, lookahead_len, lookahead_lens, rates_of
from dspark.scheduling.step_costs import StepCosts

__all__ = ["LoadAwareScheduler"]

_MARGIN = 1.02  # what estimates alone (no confidence head) must promise before a row is spent
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # steps between rows spent on a sequence of which nothing was heard
_LOOK_EVERY = 64  # steps between looks at positions that load keeps cutting
_PLAIN = 72  # drafts up to which plain numbers are faster than arrays, from logits to lengths
_HEADS = 6  # sequences up to which the best draft is looked for among their first ones, unranked
_FEW = 512  # candidates up to which they are where it comes to choosing
_MANY_BLOCKS = 16  # of one step, beyond which those of every second step are enough to remember
_GATHERED_STEPS, _GATHERED_ROWS = 192, 192  # what the calibrator is told of at once
_UNREAD_STEPS, _UNREAD_S = 64, 0.4  # steps that are only kept until they are read, and seconds of them


class _Choice(NamedTuple):
    """What a step chose by, until it is over."""

    rows: list[int]  # [R]
    survival: list[list[float]]  # [R] of up to G
    looked_up: list[bool] | None  # [R] blocks that were looked up; None = none was
    reach: int  # drafts of the longest blocks of this kind


class _Unread(NamedTuple):
    """A step that is over and was not learnt from yet."""

    number: int
    probe_s: float  # seconds of drafting a probe
    step: StepObservation
    choice: _Choice | None


class LoadAwareScheduler:
    """See the module's text and `scheduler.Scheduler`.

    Arguments:
        text: the policy as the user wrote it.
        policy: parsed.
        block_size: G.
        has_confidence: the drafter gives confidence logits.
        cost_model: seconds of a step; corrected by `observe`.
        calibrator: from logits to honest confidences; None takes them as they are.
    """

    def __init__(
        self,
        text: str,
        policy: Policy,
        *,
        block_size: int,
        has_confidence: bool,
        cost_model: CostModel,
        calibrator: Calibrator | None,
    ) -> None:
        self.policy = text
        self.cost_model = cost_model
        self.calibrator = calibrator
        self._rule = policy.name
        self._block_size = block_size
        self._has_confidence = has_confidence
        self._sees_ahead = policy.name == "auto" and has_confidence
        self._chain_len = block_size  # of blocks that are not trees
        if isinstance(calibrator, BlockCalibrator):
            self._chain_len = min(calibrator.chain_len, block_size)
        self._rows = SequenceRows()
        self._rows_seen: tuple[Int, list[int]] | None = None  # ids and rows of this step
        self._ids_seen: list[int] | None = None  # of the last step
        self._same_rows: list[int] = []  # of them
        self._new_rows: list[
            int
        ] = []  # of sequences that came, and have nothing in `_stats`, `_silent` and `_wait` yet
        self._stats = AcceptanceStats(block_size)
        self._costs = StepCosts(cost_model)
        self._ones = [
            np.array([num], np.int32) for num in range(block_size + 1)
        ]  # lengths of a single sequence
        for lengths in self._ones:
            lengths.flags.writeable = False
        self._planner = DraftPlanner(
            block_size=block_size,
            has_confidence=has_confidence,
            early_stop=policy.name == "prefix",
            costs=self._costs,
            stats=self._stats,
        )
        self._silent = np.zeros(0)  # by row: steps in which nothing of it was verified
        self._wait = np.zeros(0)  # by row: such steps until one row is spent
        self._budgets: deque[tuple[int, int]] = deque(maxlen=2)  # (drafts, blocks) of the last two steps
        self._num_steps = 0  # that drafted
        self._choice: _Choice | None = None  # of this step
        self._num_asked = 0  # drafts that this step asked for
        self._unread: list[_Unread] = []
        self._unread_s = 0.0  # seconds of them
        self._num_remembered = 0  # of them whose blocks were remembered
        self._drafted = False  # in this step
        self._gathered: list[StepObservation] = []  # for the calibrator
        self._num_gathered = 0  # rows of them

    # -- before drafting -----------------------------------------------------------------------------------

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        self._costs.age += 1
        alone = self._draft_len_alone(sequence_ids, caps) if len(caps) == 1 and not prefill_tokens else None
        if alone is not None:
            return alone
        most = caps.tolist()
        num_eligible = len(most) - most.count(0)
        self._num_asked = 0
        if not num_eligible:
            return self._lengths(most)
        rows = self._rows_of(sequence_ids)
        planner = self._planner
        probed: list[int] = []
        if planner.plan_is_due(num_eligible, prefill_tokens):
            self._read()
            if not self._has_confidence:
                self._begin_rows()
            probed = planner.replan(rows, most, prefill_tokens=prefill_tokens)
        num_steps = self._num_steps + 1
        whole = not num_steps % _LOOK_EVERY and self._look_is_due(num_steps)
        wanted = planner.wanted(rows, most, prefill_tokens=prefill_tokens, whole=whole)
        for index in probed:
            wanted[index] = most[index]
        self._num_asked = sum(wanted)
        return self._lengths(wanted)

    def _draft_len_alone(self, sequence_ids: Int, caps: Int32) -> Int32 | None:
        """Return the drafts to ask for where nothing but a single sequence goes on by its plan, else None."""
        if [sequence_ids.item()] != self._ids_seen or not (self._num_steps + 1) % _LOOK_EVERY:
            return None
        cap: int = caps.item()
        num = self._planner.wanted_alone(self._same_rows[0], cap) if cap else None
        if num is None:
            return None
        self._rows_seen = (sequence_ids, self._same_rows)
        self._num_asked = num
        return self._ones[num]

    def _lengths(self, lengths: list[int]) -> Int32:
        """Return lengths [R] as an array; that of a single sequence is not to be written to."""
        return self._ones[lengths[0]] if len(lengths) == 1 else np.array(lengths, np.int32)

    # -- after drafting ------------------------------------------------------------------------------------

    def verify_len(
        self,
        *,
        sequence_ids: Int,
        confidence_logits: Float32 | None,
        num_drafts: Int32,
        sampled: Kinds,
        altered: Bool,
        prefill_tokens: int,
    ) -> Int32:
        self._num_steps += 1
        self._choice = None
        if len(num_drafts) == 1 and confidence_logits is not None and not prefill_tokens and self._sees_ahead:
            alone = self._verify_len_alone(sequence_ids, confidence_logits, num_drafts, sampled)
            if alone is not None:
                return alone
        drafts = num_drafts.tolist()
        # By what was asked for: where a block ended early its own drafts ended it, and they must not be seen here.
        most, self._num_asked = max(sum(drafts), self._num_asked), 0
        if not any(drafts):
            return self._lengths(drafts)
        self._drafted = True
        rows = self._rows_of(sequence_ids)
        logits = _few_rated(confidence_logits)
        if logits is not None:
            verify_len = self._verify_few(
                rows, logits, drafts, sampled.tolist(), most=most, prefill_tokens=prefill_tokens
            )
            if self._num_steps % _LOOK_EVERY:
                return verify_len
            return self._look_deeper(verify_len, num_drafts, altered)
        return self._verify_mixed(
            rows, confidence_logits, num_drafts, sampled, altered, most=most, prefill_tokens=prefill_tokens
        )

    def _verify_len_alone(
        self, sequence_ids: Int, confidence_logits: Float32, num_drafts: Int32, sampled: Kinds
    ) -> Int32 | None:
        """Return verify_len [1] of a rated block of a single sequence beside no prompts, None where it is not that."""
        [logits] = confidence_logits.tolist()
        first, num = logits[0], num_drafts.item()
        if (
            first != first
            or not num
            or not self._num_steps % _LOOK_EVERY
            or self._num_asked > self._block_size
        ):
            return None
        kind = sampled.item()
        most, self._num_asked = max(num, self._num_asked), 0
        if num < len(logits):
            logits = logits[:num]
        calibrator = self.calibrator
        if calibrator is None:
            values = self._confidence_of_one(logits, sampled=kind)
        else:
            values = calibrator.confidence_of_one(logits, sampled=kind)
        survival = list(accumulate(values, mul))
        reach = self._block_size if kind == RATED else self._chain_len
        self._choice = _Choice(self._rows_of(sequence_ids), [survival], None, reach)
        self._drafted = True
        return self._ones[
            lookahead_len(
                survival,
                self._costs.alone(self._block_size + 1),
                decay=self._planner.decay,
                max_ahead=self._block_size,
                num_sizes=most + 1,
            )
        ]

    def _verify_mixed(
        self,
        rows: list[int],
        confidence_logits: Float32 | None,
        num_drafts: Int32,
        sampled: Kinds,
        altered: Bool,
        *,
        most: int,
        prefill_tokens: int,
    ) -> Int32:
        """Return verify_len [R] of many blocks, or of some that nothing rated; by way of arrays."""
        drafts = num_drafts.tolist()
        looked_up = None if confidence_logits is None else _looked_up(confidence_logits, num_drafts)
        survival = survival_of(self._confidence(rows, confidence_logits, looked_up, sampled), num_drafts)
        drafted = num_drafts > 0 if looked_up is None else (num_drafts > 0) & ~looked_up
        seconds, plain_seconds = self._seconds(
            len(drafts), int(np.count_nonzero(drafted)), most=most, prefill_tokens=prefill_tokens
        )
        num_blocks = sum(num > 0 for num in drafts)
        if survival.size <= _FEW:
            verify_len = self._verify_some(survival, plain_seconds, num_blocks)
        else:
            verify_len = self._verify_many(survival, seconds, num_blocks)
        if confidence_logits is None:
            return self._spend_on_silent(verify_len, rows, num_drafts)
        reach = self._block_size if sampled[0] == RATED else self._chain_len
        self._choice = _Choice(
            rows, survival.tolist(), None if looked_up is None else looked_up.tolist(), reach
        )
        nothing = np.int32(0)
        if looked_up is not None:
            verify_len = self._spend_on_silent(verify_len, rows, np.where(looked_up, num_drafts, nothing))
        return self._look_deeper(verify_len, np.where(drafted, num_drafts, nothing), altered)

    def _seconds(
        self, num_sequences: int, num_drafted: int, *, most: int, prefill_tokens: int
    ) -> tuple[Float64, list[float]]:
        """Return the seconds of the step with 0 .. `most` drafts, [most + 1] as array and as list.

        Arguments:
            num_drafted: blocks that the drafter ran for.
        """
        seconds, plain = self._asked(num_sequences, num_drafted, most=most, prefill_tokens=prefill_tokens)
        return seconds[: most + 1], plain[: most + 1]

    def _asked(
        self, num_sequences: int, num_drafted: int, *, most: int, prefill_tokens: int
    ) -> tuple[Float64, list[float]]:
        return self._costs.seconds(
            num_sequences=num_sequences,
            prefill_tokens=prefill_tokens,
            num_blocks=num_drafted,
            count=max(num_sequences * self._block_size, most) + 1,
        )

    def _verify_few(
        self,
        rows: list[int],
        logits: list[list[float]],
        num_drafts: list[int],
        sampled: list[int],
        *,
        most: int,
        prefill_tokens: int,
    ) -> Int32:
        """Return verify_len [R] of rated blocks; no arrays."""
        num_sequences = len(rows)
        num_blocks = num_sequences - num_drafts.count(0)
        seconds = self._asked(num_sequences, num_blocks, most=most, prefill_tokens=prefill_tokens)[1]
        confidence_of_one = (
            self._confidence_of_one if self.calibrator is None else self.calibrator.confidence_of_one
        )
        survival = []
        for of_one, num, kind in zip(logits, num_drafts, sampled, strict=True):
            values = confidence_of_one(of_one if num == len(of_one) else of_one[:num], sampled=kind)
            survival.append(list(accumulate(values, mul)))
        reach = self._block_size if sampled[0] == RATED else self._chain_len
        self._choice = _Choice(rows, survival, None, reach)
        if 1 < num_sequences <= _HEADS and self._sees_ahead:
            lens = lookahead_lens(
                survival,
                seconds,
                decay=self._planner.decay ** (1.0 / num_sequences),
                max_ahead=max(self._block_size, num_sequences),
                num_sizes=most + 1,
            )
            return np.array(lens, np.int32)
        if len(seconds) > most + 1:
            seconds = seconds[: most + 1]
        if num_sequences == 1:
            return self._ones[self._num_of_few(survival[0], seconds, 1, 1)]
        return self._ranked_few(survival, seconds, num_blocks)

    def _ranked_few(self, survival: list[list[float]], seconds: list[float], num_blocks: int) -> Int32:
        """Return verify_len [R] of some blocks with these survivals [R] of up to G."""
        num_sequences = len(survival)
        ranked = [
            (-value, position * num_sequences + sequence)  # of equals the one that comes earlier in its block
            for sequence, of_one in enumerate(survival)
            for position, value in enumerate(of_one)
        ]
        ranked.sort()
        num = self._num_of_few([-value for value, _ in ranked], seconds, num_sequences, num_blocks)
        verify_len = [0] * num_sequences
        for _, index in ranked[:num]:
            verify_len[index % num_sequences] += 1
        return np.array(verify_len, np.int32)

    def _verify_some(self, survival: Float64, seconds: list[float], num_blocks: int) -> Int32:
        """Return verify_len [R]; ranked as arrays, chosen in plain numbers."""
        num_sequences = len(survival)
        ranked = np.ascontiguousarray(survival.T).ravel()  # position-major: index = j * R + r
        order = np.argsort(-ranked, kind="stable")
        num = self._num_of_few(ranked[order].tolist(), seconds, num_sequences, num_blocks)
        return np.bincount(order[:num] % num_sequences, minlength=num_sequences).astype(np.int32)

    @staticmethod
    def _confidence_of_one(logits: list[float], *, sampled: int) -> list[float]:  # noqa: ARG004
        """Return c_k of one block as the drafter tells it."""
        return [0.5 * (1.0 + math.tanh(0.5 * value)) for value in logits]

    def _confidence(
        self, rows: list[int], logits: Float32 | None, looked_up: Bool | None, sampled: Kinds
    ) -> Float64:
        self._begin_rows()
        if logits is None:
            return self._stats.confidence(np.array(rows, np.int64))
        if self.calibrator is not None:
            rated = self.calibrator.confidence(logits, sampled=sampled)
        else:
            rated = np.asarray(0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64))))
        if looked_up is None:
            return rated
        return np.where(looked_up[:, None], self._stats.confidence(np.array(rows, np.int64)), rated)

    def _num_of_few(
        self, survival: list[float], seconds: list[float], num_sequences: int, num_blocks: int
    ) -> int:
        """Return how many of the candidates, best first, are taken."""
        if self._sees_ahead:
            return lookahead_len(
                survival,
                seconds,
                num_sequences=num_sequences,
                decay=self._planner.decay ** (1.0 / num_sequences),
                max_ahead=max(self._block_size, num_sequences),
            )
        rates = rates_of(survival, seconds, num_sequences=num_sequences)
        if self._rule == "lagged":
            return self._lagged(rates.index(max(rates)), len(rates) - 1, num_blocks, early_stop_len(rates))
        if self._rule == "prefix":
            return early_stop_len(rates)
        best = rates.index(max(rates))
        return best if rates[best] > _MARGIN * rates[0] else 0

    def _verify_many(self, survival: Float64, seconds: Float64, num_blocks: int) -> Int32:
        num_sequences = len(survival)
        candidates = rank_candidates(survival)
        theta = throughput(candidates, num_sequences=num_sequences, seconds=seconds)
        if self._rule == "lagged":
            num = self._lagged(best_num(theta), len(theta) - 1, num_blocks, early_stop_num(theta))
        elif self._rule == "prefix":
            num = early_stop_num(theta)
        elif not self._has_confidence:
            best = best_num(theta)
            num = best if theta[best] > _MARGIN * theta[0] else 0
        else:
            num = lookahead_num(
                candidates,
                theta,
                num_sequences=num_sequences,
                seconds=seconds,
                decay=self._planner.decay,
                max_ahead=max(self._block_size, num_sequences),
            )
        return verify_len_of(candidates, num, num_sequences=num_sequences)

    def _lagged(self, best: int, num_candidates: int, num_blocks: int, at_first: int) -> int:
        """Keep what a full search finds for later; return what it found two steps ago, or `at_first`."""
        earlier = self._budgets[0] if len(self._budgets) == 2 else None
        self._budgets.append((best, num_blocks))
        if earlier is None:
            return at_first
        num, blocks = earlier
        return min(round(num * num_blocks / blocks), num_candidates)

    def budget(self, num_drafts: Int32) -> int | None:
        """Return how many drafts `verify_len` is going to keep, for blocks [R] that are still to be drafted.

        None where only the drafts tell: the policy is another one, nothing is known of two steps ago, or this step
        verifies one block as a whole.
        """
        if self._rule != "lagged" or not self._has_confidence or len(self._budgets) < 2:
            return None
        if self._look_is_due(self._num_steps + 1):
            return None
        num, blocks = self._budgets[0]
        return min(round(num * int(np.count_nonzero(num_drafts)) / blocks), int(num_drafts.sum()))

    def _spend_on_silent(self, verify_len: Int32, rows: list[int], num_drafts: Int32) -> Int32:
        """Verify one draft now and then of sequences of which nothing was heard for long."""
        self._begin_rows()
        silent = (num_drafts > 0) & (verify_len == 0)
        if not silent.any():
            return verify_len
        at = np.array(rows, np.int64)
        probed = silent & (self._silent[at] >= self._wait[at])
        self._wait[at[probed]] = np.minimum(2.0 * self._wait[at[probed]], _LONGEST_WAIT)
        self._silent[at[silent]] += 1.0
        return np.where(probed, np.int32(1), verify_len)

    def _look_is_due(self, num_steps: int) -> bool:
        """Return whether the step of this number looks at positions that load keeps cutting: its blocks are whole."""
        return (
            num_steps % _LOOK_EVERY == 0
            and self.calibrator is not None
            and self.calibrator.deepest_starved() > 0
        )

    def _look_deeper(self, verify_len: Int32, num_rated: Int32, altered: Bool) -> Int32:
        """Every so often verify one whole block, when there are positions that load keeps cutting.

        Which sequence is looked at depends on the step's number alone, never on its drafts.

        Arguments:
            num_rated: [R] drafts that a look could teach something about: 0 where they were looked up.
        """
        if self.calibrator is None or not self._look_is_due(self._num_steps):
            return verify_len
        drafted = np.flatnonzero((num_rated > 0) & ~altered)
        if len(drafted):
            at = drafted[(self._num_steps // _LOOK_EVERY) % len(drafted)]
            deepest = min(int(num_rated[at]), self.calibrator.deepest_starved())
            verify_len = verify_len.copy()
            verify_len[at] = max(int(verify_len[at]), deepest)
        return verify_len

    # -- after the step ------------------------------------------------------------------------------------

    def observe(self, step: StepObservation) -> None:
        choice, self._choice = self._choice, None
        drafted, self._drafted = self._drafted, False
        planner = self._planner
        self._unread.append(_Unread(planner.num_steps, planner.probe_s, step, choice))
        planner.probe_s = 0.0
        self._unread_s += step.step_s or step.verify_s
        if choice is not None:
            rows, _, looked_up, _ = choice
            planner.settle(rows, step.num_drafts.tolist(), step.verify_len.tolist(), looked_up)
            if looked_up is not None and self._has_confidence:
                self._learn_outcomes(step, np.array(looked_up))
        if drafted and (choice is None or not self._has_confidence):  # trees are rated whatever drafts them
            self._learn_outcomes(step, None)
        if len(self._unread) >= _UNREAD_STEPS or self._unread_s >= _UNREAD_S:
            self._read()

    def _read(self) -> None:
        """Learn from the steps that were only kept: costs, promises, what blocks are worth, calibration."""
        self._remember()
        unread, self._unread, self._unread_s, self._num_remembered = self._unread, [], 0.0, 0
        for _, _, step, _ in unread:
            self.cost_model.observe(step)
        if not self._planner.promises_much:  # what these steps took counts at the machine's pace in them
            self.cost_model.flush()
        for number, probe_s, step, choice in unread:
            num_sequences = len(step.sequence_ids)
            if not num_sequences:
                continue
            self._costs.context_per_sequence = step.context_tokens / num_sequences
            self._planner.observe(step, number=number, probe_s=probe_s)
            if choice is not None and self.calibrator is not None:
                self._gathered.append(step)
                self._num_gathered += num_sequences
        if self._num_gathered >= _GATHERED_ROWS or len(self._gathered) >= _GATHERED_STEPS:
            self._learn()

    def _remember(self) -> None:
        """Remember the blocks of the steps that were only kept."""
        for number, _, step, choice in self._unread[self._num_remembered :]:
            if choice is not None and (number % 2 or len(step.sequence_ids) <= _MANY_BLOCKS):
                rows, survival, looked_up, reach = choice
                self._planner.remember(
                    rows, survival, num_drafts=step.num_drafts.tolist(), looked_up=looked_up, reach=reach
                )
        self._num_remembered = len(self._unread)

    def _learn_outcomes(self, step: StepObservation, looked_up: Bool | None) -> None:
        """Count what became of drafts that nothing rated; how a block ended says much of the very next one."""
        self._begin_rows()
        labels = acceptance_labels(step, block_size=self._block_size)
        if looked_up is not None:
            labels[~looked_up] = np.nan
        rows = np.array(self._rows_of(step.sequence_ids), np.int64)
        self._stats.observe(rows, labels)
        self._silent[rows[~np.isnan(labels[:, 0])]] = 0.0
        self._wait[rows[step.accepted > 0]] = _FIRST_WAIT

    def _learn(self) -> None:
        """Hand the gathered steps to the calibrator."""
        gathered, self._gathered, self._num_gathered = self._gathered, [], 0
        if gathered and self.calibrator is not None:
            learn_calibration(
                self.calibrator, joined(gathered), block_size=self._block_size, num_steps=len(gathered)
            )

    def release(self, sequence_id: int) -> None:
        self._rows_seen, self._ids_seen = None, None
        self._rows.release(sequence_id)

    # -- inside --------------------------------------------------------------------------------------------

    def _begin_rows(self) -> None:
        """Start anew, before what nothing rated is looked at, for the sequences that came since then."""
        new, self._new_rows = self._new_rows, []
        if not new:
            return
        num_rows = self._rows.num_rows
        self._stats.reset(new, num_rows)
        self._silent, self._wait = grown(self._silent, num_rows), grown(self._wait, num_rows)
        self._silent[new] = 0.0
        self._wait[new] = _FIRST_WAIT

    def _rows_of(self, sequence_ids: Int) -> list[int]:
        if self._rows_seen is not None and self._rows_seen[0] is sequence_ids:
            return self._rows_seen[1]
        ids = sequence_ids.tolist()
        if ids == self._ids_seen:  # the same batch as in the last step
            self._rows_seen = (sequence_ids, self._same_rows)
            return self._same_rows
        rows, new = self._rows.rows(ids)
        self._ids_seen, self._same_rows = ids, rows
        if new:
            self._remember()  # what is kept is of those who had these rows before
            num_rows = self._rows.num_rows
            self._planner.reset(new, num_rows)
            self._new_rows += new
        self._rows_seen = (sequence_ids, rows)
        return rows


def _few_rated(confidence_logits: Float32 | None) -> list[list[float]] | None:
    """Return the logits [R][G] where they are few and none was looked up."""
    if confidence_logits is None or confidence_logits.size > _PLAIN:
        return None
    logits: list[list[float]] = confidence_logits.tolist()
    for of_one in logits:
        first = of_one[0]
        if first != first:  # NaN: looked up
            return None
    return logits


def _looked_up(confidence_logits: Float32, num_drafts: Int32) -> Bool | None:
    """Return which blocks were looked up [R], None for none."""
    total = float(confidence_logits.sum())
    if total == total:  # one number tells that there is no NaN
        return None
    looked_up = is_unrated(confidence_logits, num_drafts)
    return looked_up if looked_up.any() else None
