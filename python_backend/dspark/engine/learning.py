"""The step learn: what a finished step tells the counters, the calibrator and the cost model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from dspark.drafters.interface import DraftBlock
from dspark.engine.batching import StepPlan
from dspark.engine.stats import EngineStats
from dspark.engine.step_batch import StepRows
from dspark.engine.step_report import StepReport
from dspark.sampling.verification import Verdict
from dspark.scheduling.scheduler import StepObservation

__all__ = ["StepClock", "count_step", "observe_step"]


@dataclass(slots=True)
class StepClock:
    """Seconds of the parts of one step; started when made."""

    started_s: float = field(default_factory=time.perf_counter)
    started_ns: int = field(default_factory=time.time_ns)
    draft_s: float = 0.0
    schedule_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    _mark_s: float = 0.0

    def drafted(self) -> None:
        """Say that drafting is over; nothing came before it."""
        self._mark_s = time.perf_counter()
        self.draft_s = self._mark_s - self.started_s

    def scheduled(self) -> None:
        """Say that the target pass is about to begin."""
        self.schedule_s = self._lap_s()

    def verified(self) -> None:
        """Say that the target pass is over."""
        self.verify_s = self._lap_s()

    def committed(self) -> None:
        """Say that every sequence has what it gained."""
        self.commit_s = self._lap_s()

    def report(self, observation: StepObservation | None) -> StepReport:
        """Return what the step did; everything since the commit counts as learning."""
        return StepReport(
            observation=observation,
            draft_s=self.draft_s,
            schedule_s=self.schedule_s,
            verify_s=self.verify_s,
            commit_s=self.commit_s,
            learn_s=self._lap_s(),
        )

    def _lap_s(self) -> float:
        before_s, self._mark_s = self._mark_s, time.perf_counter()
        return self._mark_s - before_s

    @property
    def step_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.started_s


def count_step(stats: EngineStats, block: DraftBlock, rows: StepRows, verdicts: list[Verdict | None]) -> None:
    """Add one step to the counters."""
    stats.num_steps += 1
    stats.num_spec_steps += int(np.count_nonzero(rows.verify_len))
    stats.num_proposed_tokens += int(block.num_tokens.sum())
    stats.num_draft_tokens += int(rows.verify_len.sum())
    stats.num_accepted_tokens += sum(0 if v is None else v.accepted for v in verdicts)


def observe_step(
    plan: StepPlan, block: DraftBlock, rows: StepRows, verdicts: list[Verdict | None], clock: StepClock
) -> StepObservation:
    """Return what the scheduler learns of a step with at least one decoding sequence."""
    failed = np.array([v is None for v in verdicts], np.bool_)
    return StepObservation(
        sequence_ids=plan.sequence_ids,
        num_drafts=block.num_tokens,
        verify_len=rows.verify_len,
        accepted=np.array([0 if v is None else v.accepted for v in verdicts], np.int32),
        confidence_logits=block.confidence_logits,
        soft_labels=None,
        sampled=plan.sampled,
        altered=plan.altered | failed,
        num_blocks=int(np.count_nonzero(block.num_tokens)),
        target_tokens=len(rows.batch.tokens),
        context_tokens=int(rows.batch.context_len.sum()),
        prefill_tokens=plan.num_prefill_tokens,
        draft_s=clock.draft_s,
        verify_s=clock.verify_s,
        step_s=clock.step_s,
    )
