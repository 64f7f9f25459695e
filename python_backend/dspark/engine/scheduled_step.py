"""Steps that wait for the device once: it drafts, chooses what is verified, lays out the pass and verifies.

The host decides who takes part, how many drafts are asked for and how many of them are kept (by the confidences of two
steps earlier), starts both models, and hears at the end what was drafted, kept and accepted. From there on such a step
is like any other.

A step is the host's where a decision needs what is drafted, or needs the host:

* policy and drafter: another rule than `lagged`, a drafter without confidences or of another kind, trees, nothing known
  of two steps ago, a block that is looked at as a whole;
* drafts: fewer than half of the decoding sequences draft, or one of them is looked up;
* requests: one that draws in this step alters its logits by its text, wants log probabilities, or has drafts judged
  token by token (`rule: rejection`);
* memory: there are no pages for all drafts.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import numpy as np

from dspark.calibration.online import OnlineCalibrator
from dspark.drafters.device_draws import BlockDraws
from dspark.drafters.interface import DraftBlock, Drafter, DraftInput, DraftLauncher
from dspark.engine.batching import Batcher, StepPlan
from dspark.engine.drafting import DraftStage
from dspark.engine.learning import StepClock
from dspark.engine.step_batch import StepRows, build_prompt_rows, build_step_rows
from dspark.engine.verifying import drawing_sequences, needs_host
from dspark.executors.interface import Float32, TargetExecutor, TargetOutput
from dspark.executors.scheduled import PassScheduler, ScheduledBatch
from dspark.executors.verifying import VerifyBatch
from dspark.scheduling.interface import BudgetScheduler, Scheduler

__all__ = ["ScheduledStep", "ScheduledSteps"]


class ScheduledStep(NamedTuple):
    """What was drafted, the rows that were computed, and what came of them."""

    block: DraftBlock
    rows: StepRows
    output: TargetOutput


class ScheduledSteps:
    """Runs such steps, where models and policy can.

    Arguments:
        target, drafter: with their caches.
        drafts: asks the policy how many drafts are wanted.
        batcher: gives pages for drafts.
        page_size: tokens of a cache page.
    """

    def __init__(
        self,
        target: TargetExecutor,
        drafter: Drafter,
        scheduler: Scheduler,
        *,
        drafts: DraftStage,
        batcher: Batcher,
        page_size: int,
    ) -> None:
        self._target = target if isinstance(target, PassScheduler) and target.schedules else None
        self._drafter = drafter if isinstance(drafter, DraftLauncher) else None
        self._scheduler = scheduler if isinstance(scheduler, BudgetScheduler) else None
        self._drafts, self._batcher, self._page_size = drafts, batcher, page_size
        self._block_size = drafter.block_size
        calibrator = scheduler.calibrator
        self._calibrator = calibrator if isinstance(calibrator, OnlineCalibrator) else None
        if calibrator is not None and self._calibrator is None:
            self._target = None  # of trees: a device has no map for them
        self._as_it_is = _uncalibrated(self._block_size)

    def run(self, plan: StepPlan, clock: StepClock) -> ScheduledStep | None:
        """Run a step; None leaves it to the host, and nothing of it was done.

        Raises:
            EngineError: the device refuses.
        """
        target, drafter, scheduler = self._target, self._drafter, self._scheduler
        if target is None or drafter is None or scheduler is None or not plan.decoding:
            return None
        if not self._drafts.enabled or target.longest_chain < self._block_size:
            return None
        if any(needs_host(sequence) for sequence in drawing_sequences(plan)):
            return None
        inputs = self._drafts.inputs(plan)
        wanted = np.array([item.max_drafts for item in inputs], np.int32)
        num_blocks = int(np.count_nonzero(wanted))
        if not num_blocks or 2 * num_blocks < len(wanted):  # blocks of the others would be drafted in vain
            return None
        budget = scheduler.budget(wanted)
        if budget is None or not self._start(drafter, plan, inputs, wanted.tolist()):
            return None
        target.launch_scheduled(self._batch(plan, budget))
        output, verify_len, pass_s = target.collect_scheduled()
        block, draft_s = drafter.collect()
        clock.overlapped(draft_s=draft_s, verify_s=pass_s)
        scheduler.verify_len(  # keeps what later steps choose by
            sequence_ids=plan.sequence_ids,
            confidence_logits=block.confidence_logits,
            num_drafts=block.num_tokens,
            sampled=plan.sampled,
            altered=plan.altered,
            prefill_tokens=plan.num_prefill_tokens,
        )
        rows = build_step_rows(plan, block, verify_len, page_size=self._page_size)
        clock.scheduled()
        return ScheduledStep(block, rows, output)

    def _start(
        self, drafter: DraftLauncher, plan: StepPlan, inputs: abc.Sequence[DraftInput], wanted: list[int]
    ) -> bool:
        """Start the drafter; False leaves the step to the host, one whose drafter fails as well."""
        try:
            able = drafter.can_launch(inputs)
        except Exception:  # as for drafts that the host waits for
            self._drafts.count_fault()
            return False
        if not able or not self._batcher.room_for_all_drafts(plan.decoding, wanted):
            return False
        try:
            drafter.launch(inputs)
        except Exception:
            self._drafts.count_fault()
            return False
        return True

    def _batch(self, plan: StepPlan, budget: int) -> ScheduledBatch:
        sequences = plan.sequences
        rows = build_prompt_rows(plan, page_size=self._page_size)
        row_start = np.zeros(len(sequences) + 1, np.int32)
        ends = [int(chunk.last) for chunk in plan.prefill]
        np.cumsum([*(0 for _ in plan.decoding), *ends], out=row_start[1:])
        return ScheduledBatch(
            anchors=np.array([sequence.token_ids[-1] for sequence in plan.decoding], np.int32),
            kinds=plan.sampled.astype(np.int32),
            calibration=self._as_it_is if self._calibrator is None else self._calibrator.maps(),
            budget=budget,
            rows=rows,
            verify=VerifyBatch(
                row_start=row_start,
                first_positions=np.array([len(sequence.token_ids) for sequence in sequences], np.int32),
                prob_rows=np.full(len(rows.logit_rows), -1, np.int32),
                draws=BlockDraws.of(sequence.sampler for sequence in sequences),
            ),
        )


def _uncalibrated(block_size: int) -> Float32:
    """Return the map that takes confidences as they are [3, G, 5]."""
    return np.tile(np.array([1.0, 0.0, 1.0, 1.0, 0.0], np.float32), (3, block_size, 1))
