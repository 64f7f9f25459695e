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
from dspark.scheduling.single import early_stop_len, lookahead_len, rates_of
from dspark.scheduling.step_costs import StepCosts

__all__ = ["LoadAwareScheduler"]

_MARGIN = 1.02  # what estimates alone (no confidence head) must promise before a row is spent
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # steps between rows spent on a sequence of which nothing was heard
_LOOK_EVERY = 64  # steps between looks at positions that load keeps cutting
_PLAIN = 72  # drafts up to which plain numbers are faster than arrays, from logits to lengths
_FEW = 512  # candidates up to which they are where it comes to choosing
_GATHERED_STEPS, _GATHERED_ROWS = 192, 192  # what is gathered before it is learnt from


# What a step chose by, until it is over: rows [R], survivals [R] of up to G, which blocks were looked up [R] (None = no
# block was), and the drafts of the longest blocks of this kind.
_Choice = tuple[list[int], list[list[float]], Bool | None, int]


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
        self._stats = AcceptanceStats(block_size)
        self._costs = StepCosts(cost_model)
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
        self._gathered: list[StepObservation] = []
        self._num_gathered = 0  # rows of them

    # -- before drafting -----------------------------------------------------------------------------------

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        self._costs.next_step()
        most = caps.tolist()
        num_eligible = len(most) - most.count(0)
        self._num_asked = 0
        if not num_eligible:
            return np.zeros_like(caps)
        rows = self._rows_of(sequence_ids)
        probed: list[int] = []
        if self._planner.plan_is_due(num_eligible, prefill_tokens):
            probed = self._planner.replan(rows, most, prefill_tokens=prefill_tokens)
        num_steps = self._num_steps + 1
        whole = not num_steps % _LOOK_EVERY and self._look_is_due(num_steps)
        wanted = self._planner.wanted(rows, most, prefill_tokens=prefill_tokens, whole=whole)
        for index in probed:
            wanted[index] = most[index]
        self._num_asked = sum(wanted)
        return np.array(wanted, np.int32)

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
        drafts = num_drafts.tolist()
        # By what was asked for: where a block ended early its own drafts ended it, and they must not be seen here.
        most, self._num_asked = max(sum(drafts), self._num_asked), 0
        if not any(drafts):
            return np.zeros_like(num_drafts)
        rows = self._rows_of(sequence_ids)
        logits = _few_rated(confidence_logits)
        if logits is not None:
            verify_len = self._verify_few(
                rows, logits, drafts, sampled.tolist(), most=most, prefill_tokens=prefill_tokens
            )
            if self._num_steps % _LOOK_EVERY:
                return verify_len
            return self._look_deeper(verify_len, num_drafts, altered)
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
        self._choice = (rows, survival.tolist(), looked_up, reach)
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
        num_blocks = 1 if num_sequences == 1 else num_sequences - num_drafts.count(0)
        seconds = self._asked(num_sequences, num_blocks, most=most, prefill_tokens=prefill_tokens)[1]
        if len(seconds) > most + 1:
            seconds = seconds[: most + 1]
        survival = [
            self._survival_of_one(of_one[:num] if num < len(of_one) else of_one, kind)
            for of_one, num, kind in zip(logits, num_drafts, sampled, strict=True)
        ]
        self._choice = (rows, survival, None, self._block_size if sampled[0] == RATED else self._chain_len)
        if num_sequences == 1:
            return np.array([self._num_of_few(survival[0], seconds, 1, 1)], np.int32)
        return self._ranked_few(survival, seconds, num_blocks)

    def _ranked_few(self, survival: list[list[float]], seconds: list[float], num_blocks: int) -> Int32:
        """Return verify_len [R] of some blocks whose survivals [R] of up to G are above 0."""
        num_sequences = len(survival)
        ranked = sorted(
            [
                (-value, position * num_sequences + sequence)
                for sequence, of_one in enumerate(survival)
                for position, value in enumerate(of_one)
            ]
        )
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

    def _survival_of_one(self, logits: list[float], sampled: int) -> list[float]:
        """Return the survivals above 0 of one block."""
        if self.calibrator is not None:
            values = self.calibrator.confidence_of_one(logits, sampled=sampled)
        else:
            values = [0.5 * (1.0 + math.tanh(0.5 * value)) for value in logits]
        survival, product = [], 1.0
        for confidence in values:
            product *= confidence
            if not product > 0.0:
                break
            survival.append(product)
        return survival

    def _confidence(
        self, rows: list[int], logits: Float32 | None, looked_up: Bool | None, sampled: Kinds
    ) -> Float64:
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
            verify_len[at] = max(int(verify_len[at]), deepest)
        return verify_len

    # -- after the step ------------------------------------------------------------------------------------

    def observe(self, step: StepObservation) -> None:
        self.cost_model.observe(step)
        num_sequences = len(step.sequence_ids)
        if not num_sequences:
            return
        self._costs.context_per_sequence = step.context_tokens / num_sequences
        self._planner.observe(step)
        choice, self._choice = self._choice, None
        if step.confidence_logits is None:
            if step.num_drafts.any():
                self._learn_outcomes(step, None)
            return
        looked_up: Bool | None
        if choice is None:
            looked_up = _looked_up(step.confidence_logits, step.num_drafts)
        else:
            rows, survival, looked_up, reach = choice
            self._planner.settle(
                rows,
                survival,
                num_drafts=step.num_drafts.tolist(),
                verify_len=step.verify_len.tolist(),
                looked_up=None if looked_up is None else looked_up.tolist(),
                reach=reach,
            )
        if not self._has_confidence:  # trees are rated nevertheless
            self._learn_outcomes(step, None)
        elif looked_up is not None:
            self._learn_outcomes(step, looked_up)
        if self.calibrator is None:
            return
        self._gathered.append(step)
        self._num_gathered += num_sequences
        if self._num_gathered >= _GATHERED_ROWS or len(self._gathered) >= _GATHERED_STEPS:
            self._learn()

    def _learn_outcomes(self, step: StepObservation, looked_up: Bool | None) -> None:
        """Count what became of drafts that nothing rated; how a block ended says much of the very next one."""
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
            num_rows = self._rows.num_rows
            self._stats.reset(new, num_rows)
            self._planner.reset(new, num_rows)
            self._silent, self._wait = grown(self._silent, num_rows), grown(self._wait, num_rows)
            self._silent[new] = 0.0
            self._wait[new] = _FIRST_WAIT
        self._rows_seen = (sequence_ids, rows)
        return rows


def _few_rated(confidence_logits: Float32 | None) -> list[list[float]] | None:
    """Return the logits [R][G] where they are few and none was looked up."""
    if confidence_logits is None or confidence_logits.size > _PLAIN:
        return None
    logits: list[list[float]] = confidence_logits.tolist()
    for of_one in logits:
        if of_one[0] != of_one[0]:  # NaN: looked up
            return None
    return logits


def _looked_up(confidence_logits: Float32, num_drafts: Int32) -> Bool | None:
    """Return which blocks were looked up [R], None for none."""
    total = float(confidence_logits.sum())
    if total == total:  # one number tells that there is no NaN
        return None
    looked_up = is_unrated(confidence_logits, num_drafts)
    return looked_up if looked_up.any() else None
