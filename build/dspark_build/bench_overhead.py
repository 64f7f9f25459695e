"""What the scheduler itself costs: on arrays alone (the choice of every verify length of one step, on one core), and
inside an engine, behind passes that empty the caches (`TimedScheduler`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dspark.calibration.online import OnlineCalibrator
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.interface import (
    Bool,
    Calibrator,
    CostEstimate,
    Float32,
    Int,
    Int32,
    Kinds,
    Scheduler,
    StepObservation,
)
from dspark.scheduling.scheduler import make_scheduler

__all__ = ["Overhead", "TimedScheduler", "measure_overhead", "overhead_table"]

_WANTED_MS = {(256, 8): 0.3, (1024, 16): 2.0}  # most milliseconds by (requests, block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Median milliseconds of `verify_len` for one batch."""

    num_sequences: int
    block_size: int
    policy: str
    calibrated: bool  # with the online calibrator in front
    milliseconds: float

    @property
    def at_most_ms(self) -> float:
        return _WANTED_MS[self.num_sequences, self.block_size]


class TimedScheduler:
    """A scheduler that counts the seconds spent in it, calibrator and cost model included."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner = inner
        self.policy = inner.policy
        self.seconds = 0.0  # since it was made

    @property
    def cost_model(self) -> CostEstimate | None:
        return self.inner.cost_model

    @property
    def calibrator(self) -> Calibrator | None:
        return self.inner.calibrator

    def draft_len(self, *, sequence_ids: Int, caps: Int32, prefill_tokens: int) -> Int32:
        started = time.perf_counter()
        wanted = self.inner.draft_len(sequence_ids=sequence_ids, caps=caps, prefill_tokens=prefill_tokens)
        self.seconds += time.perf_counter() - started
        return wanted

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
        started = time.perf_counter()
        chosen = self.inner.verify_len(
            sequence_ids=sequence_ids,
            confidence_logits=confidence_logits,
            num_drafts=num_drafts,
            sampled=sampled,
            altered=altered,
            prefill_tokens=prefill_tokens,
        )
        self.seconds += time.perf_counter() - started
        return chosen

    def observe(self, step: StepObservation) -> None:
        started = time.perf_counter()
        self.inner.observe(step)
        self.seconds += time.perf_counter() - started

    def release(self, sequence_id: int) -> None:
        started = time.perf_counter()
        self.inner.release(sequence_id)
        self.seconds += time.perf_counter() - started


def measure_overhead(*, repeats: int = 51) -> list[Overhead]:
    """Time `prefix` and `auto`, with and without a calibrator, on random confidences."""
    return [
        _measure(num_sequences, block_size, policy, calibrated, repeats)
        for num_sequences, block_size in _WANTED_MS
        for policy in ("prefix", "auto")
        for calibrated in (False, True)
    ]


def _measure(num_sequences: int, block_size: int, policy: str, calibrated: bool, repeats: int) -> Overhead:
    largest = num_sequences * (block_size + 1)
    curve = CostCurve(
        target_tokens=(1, largest), verify_s=(0.01, 0.2), num_blocks=(1, num_sequences), draft_s=(0.001, 0.02)
    )
    scheduler = make_scheduler(
        policy,
        block_size=block_size,
        has_confidence=True,
        cost_model=CostModel(curve),
        calibrator=OnlineCalibrator(block_size=block_size) if calibrated else None,
    )
    logits = np.random.default_rng(0).normal(1.0, 2.0, (num_sequences, block_size)).astype(np.float32)
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        scheduler.verify_len(
            sequence_ids=np.arange(num_sequences),
            confidence_logits=logits,
            num_drafts=np.full(num_sequences, block_size, np.int32),
            sampled=np.zeros(num_sequences, np.bool_),
            altered=np.zeros(num_sequences, np.bool_),
            prefill_tokens=0,
        )
        taken.append(time.perf_counter() - started)
    return Overhead(
        num_sequences=num_sequences,
        block_size=block_size,
        policy=policy,
        calibrated=calibrated,
        milliseconds=1e3 * float(np.median(taken)),
    )


def overhead_table(found: Sequence[Overhead]) -> str:
    """Return one line a measurement, with whether it is as wanted."""
    return "\n".join(
        f"scheduler, {one.num_sequences:5d} x {one.block_size:2d}, {one.policy:6}"
        f"{' + calibrator' if one.calibrated else '':13}{one.milliseconds:7.3f} ms  wanted under {one.at_most_ms:g}:"
        f" {'holds' if one.milliseconds < one.at_most_ms else 'MISSED'}"
        for one in found
    )
