"""A serving loop without models: a scheduler against known acceptance and known cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from dspark.scheduling.interface import Scheduler, StepObservation

from support.traffic import Kind, draw_blocks

__all__ = ["Outcome", "decode"]


@dataclass(frozen=True)
class Outcome:
    tokens: float
    seconds: float
    verify_len: float  # mean over sequences and steps
    drafted: float  # share of sequence steps that were drafted

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def decode(
    scheduler: Scheduler,
    kinds: Sequence[Kind],
    *,
    steps: int,
    block_size: int,
    verify_s: Callable[[int], float],
    draft_s: Callable[[int], float],
    seed: int = 0,
    confidence: bool = True,
    noise: float = 0.03,
    labels: bool = True,
    lifetime: int = 200,
    warm_up: int = 0,
) -> Outcome:
    """Decode one sequence of each kind for a number of steps, each replaced after `lifetime` steps.

    Greedy. `labels` gives the exact label of the first position that was cut off, as the engine does.
    """
    rng = np.random.default_rng(seed)
    num = len(kinds)
    ids = np.arange(num)
    next_id = num
    flags = np.zeros(num, np.bool_)
    tokens = seconds = verified = drafted = 0.0
    for t in range(steps + warm_up):
        if t == warm_up:
            tokens = seconds = verified = drafted = 0.0
        if t and t % max(lifetime // num, 1) == 0:
            gone = (t // max(lifetime // num, 1)) % num
            scheduler.release(int(ids[gone]))
            ids[gone] = next_id
            next_id += 1
        parts = [draw_blocks(rng, kind, 1, block_size) for kind in kinds]
        logits = np.concatenate([b.logits for b in parts])
        hit = np.concatenate([b.hit for b in parts])
        caps = np.full(num, block_size, np.int32)
        wanted = scheduler.draft_len(sequence_ids=ids, caps=caps, prefill_tokens=0)
        num_drafts = np.minimum(wanted, block_size).astype(np.int32)
        num_blocks = int(np.count_nonzero(num_drafts))
        verify_len = np.zeros(num, np.int32)
        if num_blocks:
            verify_len = scheduler.verify_len(
                sequence_ids=ids,
                confidence_logits=logits if confidence else None,
                num_drafts=num_drafts,
                sampled=flags,
                altered=flags,
                prefill_tokens=0,
            )
        assert ((verify_len >= 0) & (verify_len <= num_drafts)).all()
        run = np.logical_and.accumulate(hit, axis=1).sum(axis=1)
        accepted = np.minimum(run, verify_len).astype(np.int32)
        rows = num + int(verify_len.sum())
        jitter: npt.NDArray[np.float64] = np.exp(noise * rng.normal(size=2))
        target_time = verify_s(rows) * float(jitter[0])
        draft_time = draft_s(num_blocks) * float(jitter[1]) if num_blocks else 0.0
        soft = None
        if labels:
            at = np.arange(block_size)
            soft = np.where((at == accepted[:, None]) & (at < num_drafts[:, None]), hit, np.nan).astype(
                np.float32
            )
        scheduler.observe(
            StepObservation(
                sequence_ids=ids,
                num_drafts=num_drafts,
                verify_len=verify_len,
                accepted=accepted,
                sampled=flags,
                altered=flags,
                target_tokens=rows,
                verify_s=target_time,
                confidence_logits=logits if confidence and num_blocks else None,
                soft_labels=soft,
                num_blocks=num_blocks,
                draft_s=draft_time,
                step_s=target_time + draft_time,
            )
        )
        tokens += num + float(accepted.sum())
        seconds += target_time + draft_time
        verified += float(verify_len.mean())
        drafted += num_blocks / num
    return Outcome(tokens, seconds, verified / steps, drafted / steps)
