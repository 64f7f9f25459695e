"""The step learn: what a finished step tells the counters, the calibrator and the cost model."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock
from dspark.engine.batching import StepPlan
from dspark.engine.stats import EngineStats
from dspark.engine.step_batch import StepRows
from dspark.engine.step_report import StepReport
from dspark.executors.interface import TargetOutput
from dspark.sampling.verification import Verdict
from dspark.scheduling.scheduler import StepObservation

__all__ = ["StepClock", "count_step", "exact_labels", "observe_step"]

Float32 = npt.NDArray[np.float32]


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

    def overlapped(self, *, draft_s: float, verify_s: float) -> None:
        """Say that drafting and the target pass are over, between which nobody waited.

        What passed since the step began is shared out as the device took for either.

        Arguments:
            draft_s, verify_s: seconds on the device.
        """
        self._mark_s = time.perf_counter()
        passed_s = self._mark_s - self.started_s
        share = draft_s / (draft_s + verify_s) if draft_s + verify_s > 0.0 else 0.0
        self.draft_s, self.verify_s = share * passed_s, (1.0 - share) * passed_s

    def scheduled(self) -> None:
        """Say that the rows of the target pass are known: it is about to begin, or over."""
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


def exact_labels(block: DraftBlock, rows: StepRows, verdicts: list[Verdict | None]) -> Float32 | None:
    """Return the acceptance of drafts where it is known better than by hit and miss; None where nothing was drafted.

    Under block verification and rejection sampling these are the verdict's own labels. Under the other rules a draft
    is accepted when it is the target's own token, and the token that was added tells that of the first draft that was
    cut off.

    Returns:
        float32 [R, G] in [0, 1], NaN = unknown.
    """
    if not block.num_tokens.any():
        return None
    labels = np.full(block.tokens.shape, np.nan, np.float32)
    for index, verdict in enumerate(verdicts):
        if verdict is None or verdict.path is not None:
            continue  # what a tree showed its rater learns
        at = verdict.accepted
        if verdict.soft_labels is not None:
            labels[index, : len(verdict.soft_labels)] = verdict.soft_labels
        elif at == rows.verify_len[index] < block.num_tokens[index]:
            labels[index, at] = block.tokens[index, at] == verdict.token_ids[-1]
    return labels


def observe_step(
    plan: StepPlan,
    block: DraftBlock,
    rows: StepRows,
    output: TargetOutput,
    verdicts: list[Verdict | None],
    clock: StepClock,
) -> StepObservation:
    """Return what the scheduler learns of a step with at least one decoding sequence.

    Sequences that failed, drafted a tree or had a row that is not finite count as altered: the calibrator does not
    see them.
    """
    starts = rows.batch.query_start[: len(plan.decoding) + 1]  # of decoding sequences all rows are logit rows
    finite = np.logical_and.reduceat(output.finite[: starts[-1]], starts[:-1])
    failed = np.array([v is None or v.path is not None for v in verdicts], np.bool_) | ~finite
    return StepObservation(
        sequence_ids=plan.sequence_ids,
        num_drafts=block.num_tokens,
        verify_len=rows.verify_len,
        accepted=np.array([0 if v is None else v.accepted for v in verdicts], np.int32),
        confidence_logits=block.confidence_logits,
        soft_labels=exact_labels(block, rows, verdicts),
        sampled=plan.sampled,
        altered=plan.altered | failed,
        num_blocks=block.num_drafted,
        target_tokens=len(rows.batch.tokens),
        context_tokens=int(rows.batch.context_len.sum()),
        prefill_tokens=plan.num_prefill_tokens,
        draft_s=clock.draft_s,
        verify_s=clock.verify_s,
        step_s=clock.step_s,
    )
