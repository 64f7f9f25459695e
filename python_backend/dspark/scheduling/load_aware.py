"""The policies that weigh drafts against measured cost: `prefix`, `lagged` and `auto`.

    prefix   early stop over the drafts at hand
    lagged   as many as a full search over the drafts of two steps earlier chose; which ones, the drafts at hand say
    auto     early stop that sees over small cliffs; without a confidence head a full search over what is known of
             each sequence before its block is drawn

All three first decide whether a block is worth drafting, and probe now and then where it is not.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from dspark.scheduling.acceptance import (
    AcceptanceStats,
    SequenceRows,
    SurvivalMemory,
    acceptance_labels,
    grown,
    is_unrated,
    learn_calibration,
)
from dspark.scheduling.allocation import (
    Candidates,
    best_num,
    early_stop_num,
    lookahead_num,
    rank_candidates,
    survival_of,
    throughput,
    verify_len_of,
)
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.interface import Bool, Calibrator, Float32, Float64, Int, Int32, Int64, StepObservation
from dspark.scheduling.planning import MARGIN, plan_drafting
from dspark.scheduling.policy import Policy
from dspark.scheduling.single import early_stop_len, lookahead_len, rates_of, worth_drafting

__all__ = ["LoadAwareScheduler"]

_FREE = 0.003  # drafting below this share of the target pass is not worth a thought
_MARGIN = 1.02  # what estimates alone (no confidence head) must promise before a row is spent
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # steps between probes of a sequence that is not drafted
_PROBED, _PROBE_SHARE = 4, 0.01  # most sequences of one probe, and the share of the time that probes may take
_KNOWN_WAIT = 16  # first wait of a newcomer when there is experience with others
_MANY = 2048  # candidates beyond which one remembered block of each sequence is enough
_DEEPER = 2  # drafts more after a block that was verified whole
_LOOK_EVERY = 64  # steps between looks at positions that load keeps cutting


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
        self._rows = SequenceRows()
        self._stats = AcceptanceStats(block_size)
        self._memory = SurvivalMemory(block_size)
        self._skipped = np.zeros((16, 2))  # steps since the block: was drafted, showed anything
        self._wait = np.full((16, 2), float(_FIRST_WAIT))  # steps until the next probe of either kind
        self._depth = np.full(16, block_size, np.int32)  # drafts of a sequence's next block
        self._context_per_sequence = 0.0
        self._decay = 0.8  # usual ratio of a_{k+1} to a_k
        self._budgets: deque[tuple[int, int]] = deque(maxlen=2)  # (drafts, blocks) of the last two steps
        self._num_steps = 0
        self._probe_credit_s = 0.0
        self._pending: tuple[Int64, Float64, Int32] | None = None  # rows, survival, num_drafts of this step
        self._num_asked = 0  # drafts that this step asked for

    # -- before drafting -----------------------------------------------------------------------------------

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        wanted = self._wanted(sequence_ids=sequence_ids, caps=caps, prefill_tokens=prefill_tokens)
        self._num_asked = int(wanted.sum())
        return wanted

    def _wanted(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        num_sequences = len(caps)
        eligible = caps > 0
        num_eligible = int(eligible.sum())
        if not num_eligible:
            return np.zeros_like(caps)
        rows = self._rows_of(sequence_ids)
        draft_s = self.cost_model.draft_s_range(num_eligible)
        verify_s = self._verify_s(num_sequences, prefill_tokens, num_sequences * self._block_size + 1)
        if draft_s[-1] <= _FREE * verify_s[0]:
            return caps.copy()
        at_most = np.arange(self._block_size, dtype=np.int32) < caps[:, None]
        if self._has_confidence:
            if self._memory.num_all == 0:
                return caps.copy()  # nothing is known yet
            many = num_sequences * self._block_size > _MANY
            samples = self._memory.samples(rows, num=1 if many else SurvivalMemory.OWN) * at_most
        else:
            samples = survival_of(self._stats.confidence(rows), caps)[None]
        drafted = self._plan(samples, eligible, verify_s, draft_s)
        self._wait[rows[drafted], 0] = _FIRST_WAIT
        drafted = self._probe_blocks(rows, eligible, drafted, draft_s, float(verify_s[0]))
        self._skipped[rows, 0] = np.where(drafted, 0.0, self._skipped[rows, 0] + 1.0)
        if self._has_confidence and not self._look_is_due(self._num_steps + 1):
            caps = np.minimum(caps, self._depth[rows])
        return np.where(drafted, caps, np.int32(0))

    def _plan(self, samples: Float64, eligible: Bool, verify_s: Float64, draft_s: Float64) -> Bool:
        if len(eligible) > 1:
            return plan_drafting(
                samples,
                eligible,
                num_sequences=len(eligible),
                verify_s=verify_s,
                draft_s=draft_s,
                early_stop=self._rule == "prefix",
            )
        worth = worth_drafting(
            samples[:, 0].tolist(),
            verify_s=verify_s.tolist(),
            draft_s=float(draft_s[0]),
            margin=MARGIN,
            early_stop=self._rule == "prefix",
        )
        return np.array([worth])

    def _probe_blocks(
        self, rows: Int64, eligible: Bool, drafted: Bool, draft_s: Float64, verify_s: float
    ) -> Bool:
        """Draft a few sequences that the plan leaves out, those skipped longest, within a budget of time."""
        left = np.flatnonzero(eligible & ~drafted)
        if not len(left):
            return drafted
        self._probe_credit_s = min(self._probe_credit_s + _PROBE_SHARE * verify_s, 2.0 * float(draft_s[-1]))
        skipped, wait = self._skipped[rows[left], 0], self._wait[rows[left], 0]
        due = left[skipped >= wait]
        if not len(due):
            return drafted
        num = int(np.count_nonzero(drafted))
        paid = float(draft_s[num - 1]) if num else 0.0
        if not num:  # the fixed part of drafting is paid once: take those along that are due soon
            due = left[2.0 * skipped >= wait]
        due = due[np.argsort(-self._skipped[rows[due], 0], kind="stable")][:_PROBED]
        cost_s = float(draft_s[num + len(due) - 1]) - paid
        if cost_s > self._probe_credit_s:
            return drafted
        self._probe_credit_s -= cost_s
        self._wait[rows[due], 0] = np.minimum(2.0 * self._wait[rows[due], 0], _LONGEST_WAIT)
        drafted = drafted.copy()
        drafted[due] = True
        return drafted

    # -- after drafting ------------------------------------------------------------------------------------

    def verify_len(
        self,
        *,
        sequence_ids: Int,
        confidence_logits: Float32 | None,
        num_drafts: Int32,
        sampled: Bool,
        altered: Bool,
        prefill_tokens: int,
    ) -> Int32:
        num_sequences = len(num_drafts)
        num_blocks, num_looked_up = int(np.count_nonzero(num_drafts)), 0
        self._num_steps += 1
        if not num_blocks:
            self._pending = None
            return np.zeros_like(num_drafts)
        rows = self._rows_of(sequence_ids)
        unrated = None
        if confidence_logits is None:
            confidence = self._stats.confidence(rows)
        else:
            unrated = is_unrated(confidence_logits, num_drafts)
            num_looked_up = int(np.count_nonzero(unrated))
            confidence = self._rated(confidence_logits, sampled=sampled)
            if unrated.any():
                confidence = np.where(unrated[:, None], self._stats.confidence(rows), confidence)
        survival = survival_of(confidence, num_drafts)
        self._pending = (rows, survival, num_drafts) if confidence_logits is not None else None
        # By what was asked for: where a block ended early its own drafts ended it, and they must not be seen here.
        most = max(int(num_drafts.sum()), self._num_asked)
        self._num_asked = 0
        seconds = self._verify_s(num_sequences, prefill_tokens, most + 1)
        seconds = seconds + self.cost_model.draft_s(num_blocks - num_looked_up)
        if num_sequences == 1 and confidence_logits is not None and self._rule in ("auto", "prefix"):
            verify_len = np.array([self._len_of_one(survival[0].tolist(), seconds.tolist())], np.int32)
        else:
            candidates = rank_candidates(survival)
            num = self._num_taken(
                candidates, seconds, num_sequences, num_blocks, known_before=confidence_logits is None
            )
            verify_len = verify_len_of(candidates, num, num_sequences=num_sequences)
        if unrated is None:
            return self._probe_rows(verify_len, rows, num_drafts)
        if unrated.any():
            verify_len = self._probe_rows(verify_len, rows, np.where(unrated, num_drafts, np.int32(0)))
        return self._look_deeper(verify_len, np.where(unrated, np.int32(0), num_drafts), altered)

    def _len_of_one(self, survival: list[float], seconds: list[float]) -> int:
        rates = rates_of(survival, seconds)
        if self._rule == "prefix":
            return early_stop_len(rates)
        return lookahead_len(survival, rates, seconds, decay=self._decay, max_ahead=self._block_size)

    def _rated(self, confidence_logits: Float32, *, sampled: Bool) -> Float64:
        if self.calibrator is not None:
            return self.calibrator.confidence(confidence_logits, sampled=sampled)
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * confidence_logits.astype(np.float64))))

    def _num_taken(
        self,
        candidates: Candidates,
        seconds: Float64,
        num_sequences: int,
        num_blocks: int,
        *,
        known_before: bool,
    ) -> int:
        theta = throughput(candidates, num_sequences=num_sequences, seconds=seconds)
        if self._rule == "lagged":
            budget = best_num(theta)
            earlier = self._budgets[0] if len(self._budgets) == 2 else None
            self._budgets.append((budget, num_blocks))
            if earlier is None:
                return early_stop_num(theta)
            num, blocks = earlier
            return min(round(num * num_blocks / blocks), len(candidates.survival))
        if self._rule == "auto" and known_before:
            best = best_num(theta)
            return best if theta[best] > _MARGIN * theta[0] else 0
        if self._rule == "auto":
            return lookahead_num(
                candidates,
                theta,
                num_sequences=num_sequences,
                seconds=seconds,
                decay=self._decay,
                max_ahead=max(self._block_size, num_sequences),
            )
        return early_stop_num(theta)

    def _probe_rows(self, verify_len: Int32, rows: Int64, num_drafts: Int32) -> Int32:
        """Verify one draft now and then of sequences of which nothing was heard for long."""
        silent = (num_drafts > 0) & (verify_len == 0)
        if not silent.any():
            return verify_len
        probed = silent & (self._skipped[rows, 1] >= self._wait[rows, 1])
        at = rows[probed]
        self._wait[at, 1] = np.minimum(2.0 * self._wait[at, 1], _LONGEST_WAIT)
        self._skipped[rows[silent], 1] += 1.0
        return np.where(probed, np.int32(1), verify_len)

    def _look_is_due(self, num_steps: int) -> bool:
        """Return whether the step of this number looks at positions that load keeps cutting: its blocks are whole."""
        return (
            self.calibrator is not None
            and num_steps % _LOOK_EVERY == 0
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
        if not len(step.sequence_ids):
            return
        self._context_per_sequence = step.context_tokens / len(step.sequence_ids)
        if not step.num_drafts.any():
            return
        unrated = None
        if step.confidence_logits is not None:
            unrated = is_unrated(step.confidence_logits, step.num_drafts)
            self._remember(step.verify_len, unrated)
            if self.calibrator is not None:
                learn_calibration(self.calibrator, step, block_size=self._block_size)
            if not unrated.any():
                return
        labels = acceptance_labels(step, block_size=self._block_size)
        if unrated is not None:
            labels[~unrated] = np.nan
        rows = self._rows_of(step.sequence_ids)
        self._stats.observe(rows, labels)
        self._skipped[rows[~np.isnan(labels[:, 0])], 1] = 0.0
        self._wait[rows[step.accepted > 0], 1] = _FIRST_WAIT

    def release(self, sequence_id: int) -> None:
        self._rows.release(sequence_id)

    # -- inside --------------------------------------------------------------------------------------------

    def _rows_of(self, sequence_ids: Int) -> Int64:
        rows, new = self._rows.rows(sequence_ids.tolist())
        if new:
            num_rows = self._rows.num_rows
            self._stats.reset(new, num_rows)
            self._memory.reset(new, num_rows)
            self._skipped = grown(self._skipped, num_rows)
            self._wait = grown(self._wait, num_rows)
            if len(self._depth) < num_rows:
                self._depth = np.resize(self._depth, max(num_rows, 2 * len(self._depth)))
            self._depth[new] = self._block_size
            self._skipped[new] = 0.0
            known = self._memory.num_all >= SurvivalMemory.ALL
            self._wait[new] = (_KNOWN_WAIT if known else _FIRST_WAIT, _FIRST_WAIT)
        return rows

    def _verify_s(self, num_sequences: int, prefill_tokens: int, count: int) -> Float64:
        """Return the seconds of the target pass with 0, 1, ... drafts [count], less what the prompts' rows take.

        Drafts in a pass with many prompt rows cost what they cost there. But the prompts' own time is left
        out: whoever decodes faster only meets the next prompt sooner, so it is no fixed cost that drafts
        could share.
        """
        context_tokens = int(self._context_per_sequence * num_sequences)
        first = num_sequences + prefill_tokens
        seconds = self.cost_model.verify_s(
            first, count, num_sequences=num_sequences, context_tokens=context_tokens
        )
        if not prefill_tokens:
            return seconds
        alone = self.cost_model.verify_s(
            num_sequences, 1, num_sequences=num_sequences, context_tokens=context_tokens
        )
        return seconds - max(float(seconds[0] - alone[0]), 0.0)

    def _remember(self, verify_len: Int32, unrated: Bool) -> None:
        """Keep the survivals of the step that is over, now that none of its drafts can be chosen any more.

        The next block of a sequence is as deep as this one was worth verifying and one more: every draft is a step of
        the sequential head. A block that was verified whole was too short, and one that was looked up cost no step.
        """
        if self._pending is None:
            return
        rows, survival, num_drafts = self._pending
        self._pending = None
        drafted = num_drafts > 0
        deeper = np.where(verify_len >= num_drafts, num_drafts + _DEEPER, verify_len + 1)
        deeper = np.where(unrated, self._block_size, np.minimum(deeper, self._block_size))
        self._depth[rows[drafted]] = deeper[drafted]
        # A block cut short by its cap says nothing of what lies behind: take it to go on as it did.
        short = drafted & (num_drafts < self._block_size)
        if short.any():
            last = np.maximum(num_drafts - 1, 0)
            end = survival[np.arange(len(survival)), last]
            mean = end ** (1.0 / (last + 1.0))
            beyond = np.arange(self._block_size)[None, :] - last[:, None]
            survival = np.where(beyond > 0, end[:, None] * mean[:, None] ** np.maximum(beyond, 0), survival)
        kept = survival[drafted]
        self._memory.observe(rows[drafted], kept)
        total = float(kept[:, :-1].sum())
        if total > 0.0:
            self._decay += 0.05 * (float(kept[:, 1:].sum()) / total - self._decay)
