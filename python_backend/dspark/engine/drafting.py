"""The steps draft and schedule: which sequences get a block, and how much of it the target verifies.

The policy decides; this file asks it, asks the drafter, and sees to pages. A drafter that fails costs its drafts and
nothing else, unless the pass that takes them has been started behind it (engine/scheduled_step.py).
"""

from __future__ import annotations

import logging
from collections import abc
from dataclasses import replace

import numpy as np

from dspark.calibration.tree import RATED, TreeRater
from dspark.drafters.interface import DraftBlock, Drafter, DraftInput, DraftWriter
from dspark.engine.batching import Batcher, StepPlan
from dspark.engine.sequence import Sequence
from dspark.engine.stats import EngineStats
from dspark.engine.step_batch import StepRows
from dspark.executors.interface import Int32, TargetOutput
from dspark.sampling.verification import Verdict
from dspark.scheduling.interface import StepObservation
from dspark.scheduling.policy import parse_policy
from dspark.scheduling.scheduler import Scheduler
from dspark.scheduling.tree_choice import TreeChoice

__all__ = ["DraftStage"]

log = logging.getLogger("dspark.engine")


class DraftStage:
    """Stands between the engine, the drafter and the policy.

    Arguments:
        drafter: its cache is allocated.
        scheduler: the policy.
        batcher: gives pages for drafts.
        max_context_len: tokens of one sequence; no draft goes beyond.
        stats: faults of the drafter are counted here.
    """

    def __init__(
        self,
        drafter: Drafter,
        scheduler: Scheduler,
        *,
        batcher: Batcher,
        max_context_len: int,
        stats: EngineStats,
    ) -> None:
        self._drafter = drafter
        self._scheduler = scheduler
        self._batcher = batcher
        self._max_context_len = max_context_len
        self._stats = stats
        # A policy that never drafts spares the drafter's context as well.
        self.enabled = drafter.block_size > 0 and scheduler.policy != "none"
        self._feeds_context = self.enabled and bool(drafter.feature_layer_ids)
        self._writes_drafts = isinstance(drafter, DraftWriter) and drafter.writes_drafts
        self._rater = TreeRater()
        self._trees = TreeChoice()
        policy = parse_policy(scheduler.policy, block_size=drafter.block_size)
        self._chooses_trees = policy.needs_cost
        self._whole_blocks = policy.name == "fixed"  # K means K, also at the end of an answer
        self._makes_trees = False  # as far as was seen
        self._asked_trees = True  # in this step
        self._asked: tuple[StepPlan, list[DraftInput]] | None = None  # in this step

    def root_of(self, *, drafts: bool) -> int:
        """Return where the page chain of a sequence starts that may, or may not, draft."""
        return self._batcher.pool.root("drafter" if self._feeds_context and drafts else "target")

    def draft(self, plan: StepPlan) -> DraftBlock:
        """Return a block for the decoding sequences of this step; those not worth drafting have 0 tokens in it."""
        sequences = plan.decoding
        empty = DraftBlock.empty(len(sequences), self._drafter.block_size)
        if not self.enabled or not sequences:
            return empty
        inputs = self.inputs(plan)
        if not any(item.max_drafts for item in inputs):
            return empty
        if self._makes_trees and self._chooses_trees:
            self._asked_trees = self._trees.next_is_tree(len(sequences))
            if not self._asked_trees:
                inputs = [replace(item, may_branch=False) for item in inputs]
        try:
            block = self._drafter.propose(inputs)
            if block.tree is None:
                return block
            self._makes_trees = True
            return self._rater.rate(block)
        except Exception:  # drafts are optional: the target alone still gives the right answer
            self.count_fault()
            return empty

    def inputs(self, plan: StepPlan) -> list[DraftInput]:
        """Return what is asked for of each decoding sequence [R], [] where that is nothing of anyone.

        The policy is asked once in a step.
        """
        if self._asked is None or self._asked[0] is not plan:
            caps = [self._cap(s) for s in plan.decoding]
            wanted = self._scheduler.draft_len(
                sequence_ids=plan.sequence_ids,
                caps=np.array(caps, np.int32),
                prefill_tokens=plan.num_prefill_tokens,
            ).tolist()
            inputs: list[DraftInput] = []
            if any(wanted):
                asked = zip(plan.decoding, wanted, caps, strict=True)
                inputs = [self._input(s, min(want, cap)) for s, want, cap in asked]
            self._asked = (plan, inputs)
        return self._asked[1]

    def _input(self, sequence: Sequence, num_drafts: int) -> DraftInput:
        """Return what the drafter is asked for; pages for the drafts are held where it writes to them."""
        if num_drafts and self._writes_drafts:
            num_drafts = self._batcher.room_for_drafts(sequence, num_drafts)
        return DraftInput(
            sequence_id=sequence.sequence_id,
            token_ids=sequence.token_ids,
            max_drafts=num_drafts,
            sampler=sequence.sampler,
            pages=sequence.pages,
        )

    def schedule(self, plan: StepPlan, block: DraftBlock) -> Int32:
        """Return how many drafts of each decoding sequence are verified [R]; pages for them are held."""
        if not block.num_tokens.any():
            return np.zeros(len(plan.decoding), np.int32)
        trees = (
            block.tree is not None
        )  # rated already, and nothing that a look deeper would teach the calibrator
        verify_len = self._scheduler.verify_len(
            sequence_ids=plan.sequence_ids,
            confidence_logits=block.confidence_logits,
            num_drafts=block.num_tokens,
            sampled=np.full_like(plan.sampled, RATED) if trees else plan.sampled,
            altered=np.ones_like(plan.altered) if trees else plan.altered,
            prefill_tokens=plan.num_prefill_tokens,
        )
        room = self._batcher.room_for_drafts
        return np.array(
            [room(s, length) for s, length in zip(plan.decoding, verify_len.tolist(), strict=True)], np.int32
        )

    def learn(
        self,
        plan: StepPlan,
        block: DraftBlock,
        verdicts: abc.Sequence[Verdict | None],
        observation: StepObservation,
    ) -> None:
        """Tell the rater what became of the trees it rated, and what a step gave with trees, or without."""
        trees = block.tree is not None
        if trees:
            self._rater.observe(block, verdicts, usable=~plan.altered)
        num_blocks = observation.num_blocks
        if (
            not self._makes_trees
            or trees != self._asked_trees  # sampled requests draft chains anyway
            or observation.prefill_tokens
            or not num_blocks
            or num_blocks != np.count_nonzero(observation.num_drafts)  # some were looked up
        ):
            return
        num_sequences = len(plan.decoding)
        self._trees.observe(
            num_sequences=num_sequences,
            trees=trees,
            num_tokens=num_sequences + int(observation.accepted.sum()),
            step_s=observation.step_s,
        )

    def feed(
        self, plan: StepPlan, rows: StepRows, output: TargetOutput, verdicts: abc.Sequence[Verdict | None]
    ) -> None:
        """Hand the features of rows whose tokens are now committed to a drafter that wants them."""
        if not self._feeds_context:
            return
        root = self.root_of(drafts=True)
        kept, slots = rows.committed_rows(plan, verdicts, wanted=lambda s: s.root == root)
        if not len(kept):
            return
        assert output.features is not None
        try:
            self._drafter.observe(
                features=output.features[kept]
                if len(kept) < len(output.features)
                else output.features.copy(),
                positions=rows.batch.positions[kept],
                slots=slots,
            )
        except Exception:  # later drafts are worse for the gap, and are judged all the same
            self.count_fault()

    def count_fault(self) -> None:
        """Count a failure of the drafter, and tell of the first; called while it is handled."""
        self._stats.num_drafter_faults += 1
        if self._stats.num_drafter_faults == 1:
            log.exception("the drafter failed; the target goes on without its drafts")

    def _cap(self, sequence: Sequence) -> int:
        """Return the most drafts that could be of use: request's cap, block size, room in the context."""
        params, length = sequence.request.params, len(sequence.token_ids)
        left = self._max_context_len - length
        if not self._whole_blocks:
            left = min(left, params.max_tokens - 1 + sequence.prompt_len - length)
        cap = self._drafter.block_size if params.num_draft_tokens < 0 else params.num_draft_tokens
        return max(min(cap, left, self._drafter.block_size), 0)
