"""Which sequences are drafted, and how deep: decided before the drafter runs, for several steps at a time.

A plan is made anew every few steps and when the batch has changed; between plans a step costs a look at what was
decided. A newcomer is drafted when most are. What a plan leaves out is tried now and then all the same: sequences that
are not drafted, to see whether they have become worth it, and, where drafting promises little, some steps without it.
Who always drafts never sees what a pass over bare anchors takes, and an error there decides every plan alike.

Everything here leans on steps that are over, never on the blocks of this one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dspark.scheduling.acceptance import AcceptanceStats, SurvivalMemory, survival_beyond
from dspark.scheduling.allocation import survival_of
from dspark.scheduling.experience import PLAIN_STEPS, DraftedStep, Experience, StepTimes
from dspark.scheduling.interface import Float64, StepObservation
from dspark.scheduling.planning import MARGIN, plan_drafting
from dspark.scheduling.single import drafting_gain, plan_few
from dspark.scheduling.step_costs import StepCosts

__all__ = ["DraftPlanner"]

_FREE = 0.003  # drafting below this share of the target pass is not worth a thought
_EVERY, _EVERY_IDLE = (
    8,
    16,
)  # steps that a plan holds at most, and one that drafts nothing, or the only sequence
# A few sequences have much to win by their drafts and little to lose, so they look again sooner, and more often: by the
# number of sequences, steps that a plan which drafts nothing holds, longest wait, share of the time for probes.
_FEW_LOOK = {1: (4, 8, 0.03), 2: (8, 16, 0.02), 3: (8, 16, 0.015), 4: (8, 16, 0.01)}
_CHANGED = 4  # it holds while less than one in so many sequences has come or gone
_FIRST_WAIT, _LONGEST_WAIT = 4, 64  # steps between probes of a sequence that is not drafted
_PROBED, _PROBE_SHARE = (
    4,
    0.005,
)  # most sequences of one probe, and the share of the time that probes may take
_KNOWN_WAIT = 16  # first wait of a newcomer when there is experience with others
_MANY = 2048  # candidates beyond which one remembered block of each sequence is enough
_PLAIN = 32  # candidates up to which plans are made in plain numbers
_DECAY_SHARE = 0.02  # of a new block in the usual ratio
_DEEPER = 2  # drafts more after a block that was verified whole
# Steps that a plan which drafts nothing holds once it was found again and again for more than a few sequences.
_LONGEST_IDLE, _FEW = 64, 8
# Likewise one that drafts, of more than a few sequences, when each promised much with at least this share drafted.
_LONGEST_CLEAR, _MOST_DRAFT = 32, 0.75
_DOUBTED = (
    1.2  # times plain decoding: what promises less is compared more often with steps that draft nothing
)
_MOST_DOUBT = 0.1  # that the cost of drafts may be off by this much and more is demanded as gain, up to this
_STAY = 0.99  # times plain decoding that drafting must promise to go on
_FRESH = 64  # steps for which a plan says something of steps with prompts in them


@dataclass(slots=True)
class _Plan:
    """What was decided for batches with, or without, prompts in the pass."""

    drafts: list[bool]  # by row
    made_at: int = 0  # step
    holds: int = 0  # steps, at most
    num_eligible: int = 0
    num_sequences: int = 0
    newcomers: bool = True  # are drafted
    promising: bool = False  # so much that what single steps take does not matter
    num_drafted: int = 0
    promise: float = math.inf  # times plain decoding
    plain_s: float = 0.0  # of a step that drafts nothing
    pace: float = 1.0  # of the machine, then
    num_idle: int = 0  # plans in a row that drafted nothing
    num_clear: int = 0  # plans in a row that promised so much that little can change them
    compared: bool = False  # it holds while steps without drafts are compared, whatever was decided

    @property
    def drafts_newcomers(self) -> bool:
        return self.newcomers and not self.compared


class _Question(NamedTuple):
    """Who of a batch is worth drafting?"""

    rows: list[int]  # [R]
    caps: list[int]  # [R] most drafts
    counted: list[bool]  # [R] who is asked about
    verify_s: list[float]  # [>= R*G + 1] of the target pass with 0, 1, ... drafts
    draft_s: Float64  # [>= number asked about] of drafting 1, 2, ... blocks
    margin: float  # what drafting must promise, in times plain decoding


class DraftPlanner:
    """See the module's text. Rows are those of `SequenceRows`.

    Arguments:
        block_size: G.
        has_confidence: blocks are rated; else `stats` tell what they are worth.
        early_stop: drafts are going to be taken only up to the first that does not raise the throughput.
        costs: what steps take.
        stats: of sequences whose drafts nothing rates.
    """

    def __init__(
        self,
        *,
        block_size: int,
        has_confidence: bool,
        early_stop: bool,
        costs: StepCosts,
        stats: AcceptanceStats,
    ) -> None:
        self._block_size = block_size
        self._has_confidence = has_confidence
        self._early_stop = early_stop
        self._costs = costs
        self._stats = stats
        self._memory = SurvivalMemory(block_size)
        self._plans = (_Plan([]), _Plan([]))  # without prompts in the pass, with
        self._depth: list[int] = []  # by row: drafts of the next block
        self._looked_up: list[bool] = []  # by row: the last block was
        self._skipped: list[int] = []  # by row: steps since it was drafted
        self._wait: list[int] = []  # by row: steps until the next probe
        self.num_steps = 0
        self._planned_at = 0
        self._probe_credit_s = 0.0
        self._probe_dearer = 2.0  # what a probe cost in the end, in times of its drafting
        self.probe_s = 0.0  # drafting of the probe in this step; whoever observes the step sets it back
        self._experience: dict[int, Experience] = {}  # by twice the logarithm of the number of sequences
        self._times = StepTimes()
        self.decay = 0.8  # usual ratio of a_{k+1} to a_k

    @property
    def knows_nothing(self) -> bool:
        """Whether no rated block was ever remembered."""
        return self._has_confidence and self._memory.num_all == 0

    @property
    def promises_much(self) -> bool:
        """Whether what single steps take can hardly change the plan."""
        return self._plans[0].promising

    def reset(self, rows: list[int], num_rows: int) -> None:
        """Start anew for sequences that were just given these rows."""
        self._memory.reset(rows, num_rows)
        missing = num_rows - len(self._depth)
        self._skipped += [0] * missing
        self._wait += [_FIRST_WAIT] * missing
        self._depth += [self._block_size] * missing
        self._looked_up += [False] * missing
        for plan in self._plans:
            plan.drafts += [plan.drafts_newcomers] * missing
            for row in rows:
                plan.drafts[row] = plan.drafts_newcomers
        known = self._memory.num_all >= SurvivalMemory.ALL
        for row in rows:
            self._depth[row], self._looked_up[row] = self._block_size, False
            self._skipped[row], self._wait[row] = 0, _KNOWN_WAIT if known else _FIRST_WAIT

    # -- before drafting -------------------------------------------------------------------------------------------

    def plan_is_due(self, num_eligible: int, prefill_tokens: int) -> bool:
        """Say that a step begins; return whether `replan` must come before `wanted`."""
        self.num_steps += 1
        if prefill_tokens and self._plan_is_for_both(num_eligible):
            return False
        plan = self._plans[prefill_tokens > 0]
        changed = abs(num_eligible - plan.num_eligible)
        return self.num_steps - plan.made_at >= plan.holds or _CHANGED * changed > plan.num_eligible

    def _plan_is_for_both(self, num_eligible: int) -> bool:
        """Return whether what holds without prompts holds beside them, as long as few have left.

        So it is where drafting promises much, and where it does not pay: rows are no cheaper beside prompts.
        """
        plan = self._plans[0]
        if not plan.made_at or self.num_steps - plan.made_at > _FRESH:
            return False
        if plan.num_drafted:
            return plan.promising and 2 * abs(num_eligible - plan.num_eligible) <= plan.num_eligible
        return _CHANGED * abs(num_eligible - plan.num_eligible) <= plan.num_eligible

    def wanted_alone(self, row: int, cap: int) -> int | None:
        """Begin a step of a single sequence beside no prompts; return what `wanted` gives, None where a plan is due.

        In the latter case no step has begun. Few lines: they run behind a pass that emptied the caches.
        """
        plan, number = self._plans[0], self.num_steps + 1
        if number - plan.made_at >= plan.holds or plan.num_eligible != 1:
            return None
        self.num_steps = number
        if not plan.drafts[row]:
            return 0
        depth = self._depth[row]
        return depth if depth < cap and self._has_confidence else cap

    def wanted(self, rows: list[int], caps: list[int], *, prefill_tokens: int, whole: bool) -> list[int]:
        """Return the drafts to ask for [R] by the plan that holds; `whole` asks for whole blocks."""
        beside = prefill_tokens and not self._plan_is_for_both(len(caps) - caps.count(0))
        drafts, depth = self._plans[1 if beside else 0].drafts, self._depth
        if whole or not self._has_confidence:
            return [cap if drafts[row] else 0 for row, cap in zip(rows, caps, strict=True)]
        return [min(cap, depth[row]) if drafts[row] else 0 for row, cap in zip(rows, caps, strict=True)]

    def replan(self, rows: list[int], caps: list[int], *, prefill_tokens: int) -> list[int]:
        """Make a plan; return the indices into the batch of those that this step drafts to see what it gives."""
        plan = self._plans[prefill_tokens > 0]
        if not plan.promising:  # now it counts what the last steps took
            self._costs.model.flush()
        counted = self._counted(rows, caps)
        draft_s = self._costs.model.draft_s_range(sum(counted))
        _, verify_s = self._costs.seconds(
            num_sequences=len(rows),
            prefill_tokens=prefill_tokens,
            num_blocks=0,
            count=len(rows) * self._block_size + 1,
        )
        holds, gain, plain_s = _EVERY, math.inf, verify_s[0]
        if self.knows_nothing:
            drafted, holds = counted, 1
        elif draft_s[-1] <= _FREE * verify_s[0]:
            drafted = counted
        else:
            plain_s, flattered = self._flattered(len(rows), plain_s)
            margin = self._margin(len(rows), prefill_tokens) * flattered
            asked = _Question(rows, caps, counted, verify_s, draft_s, margin)
            drafted, gain = self._worth(asked)
            gain /= flattered
            if prefill_tokens:
                drafted = self._also_without_prompts(rows, drafted)
            holds = self._holds(plan, gain, len(rows), share=sum(drafted) / max(sum(counted), 1))
        plan.promising, plan.promise = gain >= _DOUBTED, gain
        plan.plain_s, plan.pace, plan.num_sequences = plain_s, self._costs.model.pace, len(rows)
        plan.compared = math.isfinite(gain) and not prefill_tokens and self._is_compared(drafted, gain)
        plan.holds = PLAIN_STEPS if plan.compared else holds
        self._begin(plan, rows, counted, drafted, num_eligible=len(caps) - caps.count(0))
        passed, self._planned_at = self.num_steps - self._planned_at, self.num_steps
        if plan.compared:
            return []
        return self._probed(rows, counted, drafted, draft_s, verify_s[0], passed)

    def _margin(self, num_sequences: int, prefill_tokens: int) -> float:
        """Return what estimates must promise, in times plain decoding, before anybody is drafted."""
        experience = self._experience_of(num_sequences)
        if num_sequences == 1:
            return 1.0 / experience.trust
        error = self._costs.model.rise_error(num_sequences + prefill_tokens, max(num_sequences // 2, 1))
        margin = MARGIN + min(error, _MOST_DOUBT) * experience.doubt
        if self._plans[prefill_tokens > 0].num_drafted:  # to go on takes less, as far as it was seen to pay
            margin = _STAY + (margin - _STAY) * experience.doubt
        return margin / experience.trust

    def _flattered(self, num_sequences: int, foreseen_s: float) -> tuple[float, float]:
        """Return the seconds of a step that drafts nothing, and how many times too much drafting seems to give.

        That is where such steps are foreseen too long and those that draft are not: an error that they share, as
        when the machine has become faster, changes no choice.
        """
        pace = self._costs.model.pace
        plain_s = self._times.plain_s(self.num_steps, num_sequences=num_sequences, pace=pace)
        if plain_s is None:
            return foreseen_s, 1.0
        if plain_s >= foreseen_s:
            return plain_s, 1.0

        model, context = self._costs.model, int(self._costs.context_per_sequence * num_sequences)

        def step_s(taken: DraftedStep) -> float:
            verify_s = model.verify_s(taken.rows, 1, num_sequences=num_sequences, context_tokens=context)
            return float(verify_s[0]) + model.draft_s(taken.num_blocks)

        error = self._times.drafted_error(
            self.num_steps, num_sequences=num_sequences, foreseen_s=step_s, pace=pace
        )
        return plain_s, 1.0 if error is None else max(foreseen_s / plain_s * error, 1.0)

    def _also_without_prompts(self, rows: list[int], drafted: list[bool]) -> list[bool]:
        """Leave out whom steps without prompts do not draft: rows are no cheaper beside prompts."""
        plan = self._plans[0]
        other_size = _CHANGED * abs(plan.num_sequences - len(rows)) > plan.num_sequences
        if not plan.made_at or other_size or self.num_steps - plan.made_at > max(plan.holds, _FRESH):
            return drafted
        return [chosen and plan.drafts[row] for row, chosen in zip(rows, drafted, strict=True)]

    def _holds(self, plan: _Plan, gain: float, num_sequences: int, *, share: float) -> int:
        """Return for how many steps a plan holds that drafts this share of the sequences it is about."""
        alone = num_sequences == 1
        if share:
            plan.num_idle = 0
            plan.num_clear = plan.num_clear + 1 if gain >= _DOUBTED and share >= _MOST_DRAFT else 0
            if not plan.num_clear:
                return _EVERY
            steps = _EVERY_IDLE if alone else _EVERY
            most = _LONGEST_IDLE if num_sequences in _FEW_LOOK else _LONGEST_CLEAR
            return min(steps << (plan.num_clear // 2), most if share == 1.0 else _EVERY_IDLE)
        plan.num_clear = 0
        if num_sequences in _FEW_LOOK:
            return _FEW_LOOK[num_sequences][0]
        plan.num_idle += 1
        return min(
            _EVERY_IDLE << (plan.num_idle // 2), _LONGEST_IDLE if num_sequences > _FEW else _EVERY_IDLE
        )

    def _experience_of(self, num_sequences: int) -> Experience:
        size = round(2.0 * math.log2(num_sequences))
        if size not in self._experience:
            self._experience[size] = Experience(alone=num_sequences == 1)
        return self._experience[size]

    def _is_compared(self, drafted: list[bool], gain: float) -> bool:
        experience = self._experience_of(len(drafted))
        if any(drafted):
            return experience.comparison_is_due(self.num_steps, clear=gain >= _DOUBTED)
        experience.idle()
        return False

    def _counted(self, rows: list[int], caps: list[int]) -> list[bool]:
        """Return for which sequences drafting is the question [R].

        What was looked up costs no drafting, and goes on being looked up: it takes no part, unless nothing else is
        there.
        """
        looked_up = self._looked_up
        counted = [cap > 0 and not looked_up[row] for row, cap in zip(rows, caps, strict=True)]
        return counted if any(counted) else [cap > 0 for cap in caps]

    def _begin(
        self,
        plan: _Plan,
        rows: list[int],
        counted: list[bool],
        drafted: list[bool],
        *,
        num_eligible: int,
    ) -> None:
        """Start a plan; what was found stands while it is compared, and goes on being demanded less of."""
        plan.made_at, plan.num_eligible = self.num_steps, num_eligible
        plan.num_drafted = sum(drafted)
        plan.newcomers = 2 * plan.num_drafted > sum(counted)
        for row, chosen, asked in zip(rows, drafted, counted, strict=True):
            # `settle` takes the latter back once it is looked up no more
            plan.drafts[row] = (chosen and not plan.compared) or not asked

    def _worth(self, asked: _Question) -> tuple[list[bool], float]:
        """Return who is worth drafting [R], and how many times plain decoding that promises."""
        rows = asked.rows
        if len(rows) > 1 and len(rows) * self._block_size > _PLAIN:
            return self._worth_of_many(asked)
        if self._has_confidence:
            blocks = self._memory.blocks(rows)
            blocks = [[one[:cap] for one in of_one] for of_one, cap in zip(blocks, asked.caps, strict=True)]
        else:
            confidence = self._stats.confidence(np.array(rows, np.int64))
            blocks = [[of_one] for of_one in survival_of(confidence, np.array(asked.caps, np.int32)).tolist()]
        if len(rows) > 1:
            return plan_few(
                blocks,
                asked.counted,
                verify_s=asked.verify_s,
                draft_s=asked.draft_s.tolist(),
                early_stop=self._early_stop,
                margin=asked.margin,
            )
        gain = drafting_gain(
            blocks[0], verify_s=asked.verify_s, draft_s=float(asked.draft_s[0]), early_stop=self._early_stop
        )
        return [gain > asked.margin], gain

    def _worth_of_many(self, asked: _Question) -> tuple[list[bool], float]:
        """Return `_worth` by way of arrays."""
        num_sequences, at_most = len(asked.rows), np.array(asked.caps, np.int32)
        if self._has_confidence:
            many = num_sequences * self._block_size > _MANY
            samples = self._memory.samples(asked.rows, num=1 if many else SurvivalMemory.OWN)
            samples = samples * (np.arange(self._block_size, dtype=np.int32) < at_most[:, None])
        else:
            samples = survival_of(self._stats.confidence(np.array(asked.rows, np.int64)), at_most)[None]
        drafted, gain = plan_drafting(
            samples,
            np.array(asked.counted, np.bool_),
            num_sequences=num_sequences,
            verify_s=np.array(asked.verify_s),
            draft_s=asked.draft_s,
            early_stop=self._early_stop,
            margin=asked.margin,
        )
        return drafted.tolist(), gain

    def _probed(
        self,
        rows: list[int],
        counted: list[bool],
        drafted: list[bool],
        draft_s: Float64,
        verify_s: float,
        passed: int,
    ) -> list[int]:
        """Return a few sequences that the plan leaves out, those skipped longest, within a budget of time."""
        skipped, wait = self._skipped, self._wait
        for row, chosen in zip(rows, drafted, strict=True):
            if chosen:
                skipped[row], wait[row] = 0, _FIRST_WAIT
            else:
                skipped[row] += passed
        left = [index for index, asked in enumerate(counted) if asked and not drafted[index]]
        if not left:
            return []
        most = 2.0 * float(draft_s[-1])
        _, longest_wait, share = _FEW_LOOK.get(len(rows), (0, _LONGEST_WAIT, _PROBE_SHARE))
        self._probe_credit_s = min(self._probe_credit_s + share * verify_s * passed, most)
        due = [index for index in left if skipped[rows[index]] >= wait[rows[index]]]
        if not due:
            return []
        num = sum(drafted)
        paid = float(draft_s[num - 1]) if num else 0.0
        if not num:  # the fixed part of drafting is paid once: take those along that are due soon
            due = [index for index in left if 2 * skipped[rows[index]] >= wait[rows[index]]]
        due = sorted(due, key=lambda index: -skipped[rows[index]])[:_PROBED]
        cost_s = float(draft_s[num + len(due) - 1]) - paid
        if cost_s > self._probe_credit_s:
            return []
        self._probe_credit_s -= cost_s * self._probe_dearer
        self.probe_s = 0.0 if num else cost_s
        for index in due:
            wait[rows[index]] = min(2 * wait[rows[index]], longest_wait)
            skipped[rows[index]] = 0
        return due

    # -- after the step --------------------------------------------------------------------------------------------

    def observe(self, step: StepObservation, *, number: int, probe_s: float) -> None:
        """Count what a step that is over gave against what its plan promised; called before the plan is replaced.

        Steps with prompts say nothing here.

        Arguments:
            number: of the step, `num_steps` in it.
            probe_s: likewise.
        """
        num_sequences, step_s = len(step.sequence_ids), step.step_s or step.draft_s + step.verify_s
        if step.prefill_tokens or not 0.0 < step_s < math.inf:
            return
        pace, drafts = self._costs.model.pace, step.num_drafts.tolist()
        num_blocks = num_sequences - drafts.count(0)
        if not num_blocks:
            self._times.observe_plain(number, num_sequences=num_sequences, step_s=step_s, pace=pace)
            return
        run = num_blocks if step.num_blocks is None else step.num_blocks
        taken = DraftedStep(step.target_tokens, run, step_s)
        self._times.observe_drafted(number, num_sequences=num_sequences, taken=taken, pace=pace)
        plan = self._plans[0]
        if plan.num_sequences != num_sequences or step.num_blocks not in (None, num_blocks):
            return  # not what was planned, or some were looked up
        plain_s = plan.plain_s * pace / plan.pace  # a machine that has become slower is not the drafts' fault
        if probe_s:
            gained_s = int(step.accepted.sum()) * plain_s / num_sequences
            dearer = (step_s - plain_s - gained_s) / probe_s
            self._probe_dearer += 0.1 * (min(max(dearer, 0.5), 8.0) - self._probe_dearer)
        elif plan.num_drafted and not plan.compared and math.isfinite(plan.promise):
            self._experience_of(num_sequences).drafted(
                promise=plan.promise,
                num_tokens=num_sequences + int(step.accepted.sum()),
                num_sequences=num_sequences,
                step_s=step_s,
                plain_s=plain_s,
            )

    def settle(
        self,
        rows: list[int],
        num_drafts: list[int],
        verify_len: list[int],
        looked_up: list[bool] | None,
    ) -> None:
        """Choose the depth of the next blocks after a step that is over: none of its drafts can be chosen any more.

        The next block of a sequence is as deep as this one was worth verifying and one more: every draft is a step
        of the sequential head. A block that was verified whole was too short. One that was looked up cost no step and
        tells nothing of what the drafter's blocks are worth.
        """
        depth, was_looked_up = self._depth, self._looked_up
        for index, row in enumerate(rows):
            drafts = num_drafts[index]
            if not drafts:
                continue
            if looked_up is not None and looked_up[index]:
                was_looked_up[row], depth[row] = True, self._block_size
                continue
            if was_looked_up[row]:
                was_looked_up[row] = False
                for plan in self._plans:
                    plan.drafts[row] = plan.drafts_newcomers
            verified = verify_len[index]
            deep = drafts + _DEEPER if verified >= drafts else verified + 1
            depth[row] = deep if deep < self._block_size else self._block_size

    def remember(
        self,
        rows: list[int],
        survival: list[list[float]],
        *,
        num_drafts: list[int],
        looked_up: list[bool] | None,
        reach: int,
    ) -> None:
        """Keep what the blocks of a step were worth.

        Arguments:
            survival: [R] lists of up to G, 0 where a block ends.
            reach: drafts of the longest blocks of this kind: nothing is taken to lie behind them.
        """
        first = later = 0.0
        num = 0
        for index, (row, drafts) in enumerate(zip(rows, num_drafts, strict=True)):
            if not drafts or (looked_up is not None and looked_up[index]):
                continue
            block = survival_beyond(
                survival[index], num_drafts=drafts, reach=reach, block_size=self._block_size
            )
            self._memory.observe(row, block)
            total = sum(block)
            first += total - block[-1]
            later += total - block[0]
            num += 1
        if first > 0.0:
            share = 1.0 - (1.0 - _DECAY_SHARE) ** num
            self.decay += share * (later / first - self.decay)
