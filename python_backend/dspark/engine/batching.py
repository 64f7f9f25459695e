"""Who takes part in the next step: admission by pages and token budget, chunked prefill, preemption by recompute.

Decoding sequences always take part. What the token budget leaves goes to prefill chunks, oldest first, and then to
newcomers. When pages run out the youngest running sequence gives all of its pages back and waits at the head of its
class; it is recomputed later. The oldest sequence can always go on, so the pool cannot deadlock.
"""

from __future__ import annotations

from bisect import insort
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from dspark.engine.pages import PagePool
from dspark.engine.sequence import Sequence
from dspark.scheduling.interface import COUPLED, GREEDY, REJECTION

__all__ = ["AGEING_S", "Batcher", "PrefillChunk", "StepPlan"]

_KINDS: Final = {"greedy": GREEDY, "block": REJECTION, "rejection": REJECTION, "coupled": COUPLED}
AGEING_S: Final = 10.0  # seconds of waiting that are worth one level of priority


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows start .. start+count-1 of a prompt; `last` when the next token is drawn from its last row."""

    sequence: Sequence
    start: int
    count: int
    last: bool


@dataclass(frozen=True)
class StepPlan:
    """Who takes part in a step, in the order of the pass's rows."""

    decoding: tuple[Sequence, ...]
    prefill: tuple[PrefillChunk, ...]

    @property
    def empty(self) -> bool:
        return not self.decoding and not self.prefill

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*self.decoding, *(chunk.sequence for chunk in self.prefill))

    @cached_property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.count for chunk in self.prefill)

    @cached_property
    def sequence_ids(self) -> npt.NDArray[np.int64]:
        """Ids of the decoding sequences [R]."""
        return np.array([s.sequence_id for s in self.decoding], np.int64)

    @cached_property
    def sampled(self) -> npt.NDArray[np.int8]:
        """How the drafts of the decoding sequences are judged [R]: 0 = greedily, see `scheduling.interface`."""
        return np.array([_KINDS[s.sampler.rule] for s in self.decoding], np.int8)

    @cached_property
    def altered(self) -> npt.NDArray[np.bool_]:
        """Which decoding sequences change their logits [R]."""
        return np.array([s.request.params.alters_logits for s in self.decoding], np.bool_)


def _service_order(sequence: Sequence) -> tuple[float, int]:
    """Return the place in the order of service: by priority, and a request gains one for every AGEING_S it waits.

    All age alike, so who is before whom never changes: a level of priority is worth that many seconds of arrival.
    """
    arrived_s = sequence.metrics.arrival_time_ns / 1e9
    return (arrived_s - AGEING_S * sequence.request.priority, sequence.arrival)


class Batcher:
    """Holds the waiting and the running sequences, both in the order they are served."""

    def __init__(self, pool: PagePool, *, max_batch_size: int, max_step_tokens: int) -> None:
        self.pool = pool
        self.max_batch_size = max_batch_size
        self.max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_service_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its pages back."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.pool.release(sequence.drop_pages())

    def plan(self, *, max_prefill: int | None = None) -> StepPlan:
        """Choose the next step's rows; pages for all of them but the drafts are held when it returns.

        Arguments:
            max_prefill: most prompt tokens beside decoding sequences; None = what `max_step_tokens` leaves.
        """
        for sequence in tuple(self.running):
            if sequence.decoding and sequence in self.running:
                self._make_room(sequence, len(sequence.token_ids))
        num_decoding = sum(sequence.decoding for sequence in self.running)
        budget = self.max_step_tokens - num_decoding
        if max_prefill is not None and num_decoding:
            budget = min(budget, max_prefill)
        chunks: list[PrefillChunk] = []
        for sequence in self.running:
            budget -= self._add_chunk(chunks, sequence, budget)
        while budget > 0 and self.waiting and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            del self.waiting[0]
            insort(self.running, sequence, key=_service_order)
            budget -= self._add_chunk(chunks, sequence, budget)
        return StepPlan(tuple(s for s in self.running if s.decoding), tuple(chunks))

    def room_for_drafts(self, sequence: Sequence, num_drafts: int) -> int:
        """Hold pages for the anchor and its drafts; return how many of the drafts fit without preempting anyone."""
        capacity = sequence.num_pages * self.pool.page_size - len(sequence.token_ids)
        if capacity < num_drafts:
            missing = self.pool.pages_for(num_drafts - capacity)
            pages = self.pool.allocate(min(missing, self.pool.num_available)) or []
            sequence.hold_pages(pages)
            capacity += len(pages) * self.pool.page_size
        return min(num_drafts, capacity)

    def room_for_all_drafts(self, sequences: abc.Sequence[Sequence], num_drafts: abc.Sequence[int]) -> bool:
        """Hold pages for anchors and all drafts of these sequences; False, and hold none, where there are too few."""
        pages_for, missing = self.pool.pages_for, 0
        for sequence, count in zip(sequences, num_drafts, strict=True):
            missing += max(pages_for(len(sequence.token_ids) + count) - sequence.num_pages, 0)
        if missing > self.pool.num_available:
            return False
        for sequence, count in zip(sequences, num_drafts, strict=True):
            self.room_for_drafts(sequence, count)
        return True

    def register_full_pages(self, sequence: Sequence) -> None:
        """Make every newly filled page findable for later prompts."""
        size = self.pool.page_size
        while (sequence.num_registered + 1) * size <= sequence.cached_len:
            index = sequence.num_registered
            sequence.node = self.pool.register(
                int(sequence.page_row[index]),
                parent=sequence.node,
                tokens=sequence.token_ids[index * size : (index + 1) * size],
            )
            sequence.num_registered += 1

    # -- inside ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _add_chunk(chunks: list[PrefillChunk], sequence: Sequence, budget: int) -> int:
        missing = sequence.prefill_end - sequence.cached_len
        if missing <= 0 or budget <= 0:
            return 0
        count = min(missing, budget)
        draws = count == missing and sequence.output_len == 0
        chunks.append(PrefillChunk(sequence, sequence.cached_len, count, draws))
        return count

    def _admit(self, sequence: Sequence) -> bool:
        fresh = sequence.output_len == 0
        needed = self.pool.pages_for(sequence.prefill_end + (0 if fresh else 1))
        # A new sequence always computes its last prompt token: its first token is drawn from that row.
        reusable = (sequence.prefill_end - (1 if fresh else 0)) // self.pool.page_size
        match = self.pool.match_prefix(sequence.token_ids, root=sequence.root, max_pages=reusable)
        spare = sum(other.decoding for other in self.running)  # each of them may soon want one more page
        missing = needed - len(match.pages)
        pages = self.pool.allocate(missing) if missing + spare <= self.pool.num_available else None
        if pages is None:
            self.pool.release(match.pages)
            return False
        sequence.hold_pages([*match.pages, *pages])
        sequence.cached_len = len(match.pages) * self.pool.page_size
        sequence.num_registered = len(match.pages)
        if sequence.metrics.first_scheduled_time_ns == 0:
            sequence.metrics.num_cached_pages = len(match.pages)
        sequence.node = match.node
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int) -> None:
        """Hold pages for `num_tokens` tokens, preempting the youngest as often as it takes."""
        while (missing := self.pool.pages_for(num_tokens) - sequence.num_pages) > 0:
            pages = self.pool.allocate(missing)
            if pages is not None:
                sequence.hold_pages(pages)
                return
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.drop_pages())
        self.add(sequence)
        self.num_preemptions += 1
