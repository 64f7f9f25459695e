"""A serving machine in discrete events: the real scheduler and calibrator, a cost curve in place of the models.

What happens in a step is what the engine does (admit, prefill beside decoding, draft, schedule, verify,
commit, learn); only tokens and seconds are drawn instead of computed. Nothing here knows files or plots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dspark.calibration.online import OnlineCalibrator
from dspark.scheduling.cost_model import CostCurve, CostModel
from dspark.scheduling.interface import Scheduler, StepObservation
from dspark.scheduling.scheduler import make_scheduler
from dspark.scheduling.traffic import Acceptance, Arrival

__all__ = ["RunResult", "simulate"]

_NOISE = 0.02  # of step times


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one policy made of one load, after the warm-up."""

    policy: str
    arrivals: str
    tokens_per_second: float  # all users together
    user_tokens_per_second: (
        float  # mean over finished requests, first token to last; with none, of those at work
    )
    mean_running: float  # sequences decoding
    mean_verify_len: float  # drafts verified per sequence and step
    drafted_share: float  # of sequence steps
    accepted_len: float  # tokens per sequence and step, the target's own among them
    first_token_s: float  # median wait for the first token
    cost_model_error: float  # median relative error of predicted step times
    calibration_ece: float  # mean over positions
    num_finished: int
    seconds: float


@dataclass(slots=True)
class _Running:
    sequence_id: int
    request: Arrival
    arrived_s: float
    prefill_left: int
    first_token_s: float = -1.0
    output_len: int = 0


def simulate(
    *,
    policy: str,
    arrivals: str,
    requests: Iterator[Arrival],
    closed: int | None,
    curve: CostCurve,
    acceptance: Acceptance,
    num_steps: int,
    max_batch_size: int,
    max_step_tokens: int,
    seed: int = 0,
) -> RunResult:
    """Run one policy under one load.

    Arguments:
        arrivals: the load's name, for the result.
        requests, closed: as `arrivals_of` gives them.
        curve: the machine. The scheduler starts with the same curve and corrects it while running.
        num_steps: steps to run; the first fifth is warm-up and not counted.
        max_batch_size: sequences at a time.
        max_step_tokens: rows of a pass; prefill is cut into chunks that fit.
    """
    rng = np.random.default_rng([seed, 3])
    truth, block_size = CostModel(curve), acceptance.block_size
    calibrator = OnlineCalibrator(block_size=block_size)
    learnt = CostModel(curve)
    scheduler = make_scheduler(
        policy, block_size=block_size, has_confidence=True, cost_model=learnt, calibrator=calibrator
    )
    tally = _Tally()
    waiting: deque[_Running] = deque()
    running: list[_Running] = []
    upcoming = next(requests, None)
    limit = max_batch_size if closed is None else min(closed, max_batch_size)
    now, next_id = 0.0, 0
    for step in range(num_steps):
        if step == num_steps // 5:
            tally = _Tally(started_s=now)
        while upcoming is not None and (
            upcoming.time_s <= now if closed is None else len(running) + len(waiting) < closed
        ):
            arrived = upcoming.time_s if closed is None else now
            waiting.append(_Running(next_id, upcoming, arrived, upcoming.prompt_len))
            next_id += 1
            upcoming = next(requests, None)
        while waiting and len(running) < limit:
            running.append(waiting.popleft())
        if not running:
            if upcoming is None:
                break
            now = max(now, upcoming.time_s)
            continue
        decoding = [s for s in running if s.prefill_left == 0]
        prefilled, prefill_tokens = _prefill(running, max_step_tokens - len(decoding))
        now += _step(
            rng,
            decoding,
            prefill_tokens,
            scheduler=scheduler,
            truth=truth,
            acceptance=acceptance,
            tally=tally,
        )
        for sequence in prefilled:
            sequence.first_token_s, sequence.output_len = now, 1
            tally.waits.append(now - sequence.arrived_s)
            tally.tokens += 1
        for sequence in decoding + prefilled:
            if sequence.output_len >= sequence.request.output_len:
                scheduler.release(sequence.sequence_id)
                running.remove(sequence)
                tally.finish(sequence, now)
    return tally.result(policy, arrivals, now, learnt.error, calibrator)


def _prefill(running: list[_Running], room: int) -> tuple[list[_Running], int]:
    """Advance prompts within the rows that are left; return the sequences whose prompt is done, and the rows."""
    done, rows = [], 0
    for sequence in running:
        if sequence.prefill_left and rows < room:
            chunk = min(sequence.prefill_left, room - rows)
            sequence.prefill_left -= chunk
            rows += chunk
            if not sequence.prefill_left:
                done.append(sequence)
    return done, rows


def _step(
    rng: np.random.Generator,
    decoding: list[_Running],
    prefill_tokens: int,
    *,
    scheduler: Scheduler,
    truth: CostModel,
    acceptance: Acceptance,
    tally: _Tally,
) -> float:
    """Run one step of the decoding sequences and return its seconds."""
    num, block_size = len(decoding), acceptance.block_size
    jitter = np.exp(_NOISE * rng.normal(size=2))
    if not num:
        return float(truth.verify_s(max(prefill_tokens, 1), 1)[0] * jitter[0])
    ids = np.array([s.sequence_id for s in decoding])
    left = np.array([s.request.output_len - s.output_len - 1 for s in decoding])
    caps = np.clip(left, 0, block_size).astype(np.int32)
    logits, hit = acceptance.draw(
        rng, np.array([s.request.kind for s in decoding]), np.array([s.request.odds for s in decoding])
    )
    greedy = np.zeros(num, np.bool_)
    num_drafts = np.minimum(
        scheduler.draft_len(sequence_ids=ids, caps=caps, prefill_tokens=prefill_tokens), caps
    ).astype(np.int32)
    num_blocks = int(np.count_nonzero(num_drafts))
    verify_len = np.zeros(num, np.int32)
    if num_blocks:
        verify_len = scheduler.verify_len(
            sequence_ids=ids,
            confidence_logits=logits,
            num_drafts=num_drafts,
            sampled=greedy,
            altered=greedy,
            prefill_tokens=prefill_tokens,
        )
    run = np.logical_and.accumulate(hit, axis=1).sum(axis=1)
    accepted = np.minimum(run, verify_len).astype(np.int32)
    # The row of the added token tells whether the first draft that was cut off would have passed.
    at = np.arange(block_size)
    shown = (at == accepted[:, None]) & (at < num_drafts[:, None])
    rows = num + prefill_tokens + int(verify_len.sum())
    context = sum(s.request.prompt_len + s.output_len for s in decoding)
    verify_s = float(truth.verify_s(rows, 1, num_sequences=num, context_tokens=context)[0] * jitter[0])
    draft_s = truth.draft_s(num_blocks) * float(jitter[1])
    scheduler.observe(
        StepObservation(
            sequence_ids=ids,
            num_drafts=num_drafts,
            verify_len=verify_len,
            accepted=accepted,
            sampled=greedy,
            altered=greedy,
            target_tokens=rows,
            verify_s=verify_s,
            confidence_logits=logits if num_blocks else None,
            soft_labels=np.where(shown, hit, np.nan).astype(np.float32),
            num_blocks=num_blocks,
            prefill_tokens=prefill_tokens,
            context_tokens=context,
            draft_s=draft_s,
        )
    )
    for sequence, committed in zip(decoding, (accepted + 1).tolist(), strict=True):
        sequence.output_len += committed
    tally.steps += 1
    tally.tokens += num + int(accepted.sum())
    tally.sequence_steps += num
    tally.decoded += num + int(accepted.sum())
    tally.verified += int(verify_len.sum())
    tally.drafted += num_blocks
    return verify_s + draft_s


@dataclass(slots=True)
class _Tally:
    """Counts since the warm-up."""

    started_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    decoded: int = 0
    sequence_steps: int = 0
    verified: int = 0
    drafted: int = 0
    waits: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def finish(self, sequence: _Running, now: float) -> None:
        if sequence.output_len > 1 and now > sequence.first_token_s:
            self.speeds.append((sequence.output_len - 1) / (now - sequence.first_token_s))

    def result(
        self, policy: str, arrivals: str, now: float, cost_model_error: float, calibrator: OnlineCalibrator
    ) -> RunResult:
        seconds = max(now - self.started_s, 1e-12)
        steps = max(self.sequence_steps, 1)
        mean_running = self.sequence_steps / max(self.steps, 1)
        of_one = self.decoded / seconds / max(mean_running, 1.0)
        ece = calibrator.ece()
        known = ece[~np.isnan(ece)]
        return RunResult(
            policy=policy,
            arrivals=arrivals,
            tokens_per_second=self.tokens / seconds,
            user_tokens_per_second=float(np.mean(self.speeds)) if self.speeds else of_one,
            mean_running=mean_running,
            mean_verify_len=self.verified / steps,
            drafted_share=self.drafted / steps,
            accepted_len=self.decoded / steps,
            first_token_s=float(np.median(self.waits)) if self.waits else 0.0,
            cost_model_error=cost_model_error,
            calibration_ece=float(known.mean()) if len(known) else 0.0,
            num_finished=len(self.speeds),
            seconds=seconds,
        )
