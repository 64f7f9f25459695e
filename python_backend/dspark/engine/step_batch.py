"""From a plan to the flattened rows of one target pass, and back from rows to sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dspark.drafters.interface import DraftBlock
from dspark.engine.batching import StepPlan
from dspark.engine.sequence import Sequence
from dspark.executors.interface import Int32, StepBatch

__all__ = ["StepRows", "build_step_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The pass and how to find one's rows in it. Decoding sequences come first, prefill chunks after them.

    A decoding sequence has 1 + verify_len rows, all with logits, so its logit rows are its rows.
    """

    batch: StepBatch
    verify_len: Int32  # [R] of the decoding sequences
    first_token_rows: tuple[int, ...]  # index into the logits of each chunk that ends its prompt

    def num_drafts(self, index: int) -> int:
        return int(self.verify_len[index])

    def logit_span(self, index: int) -> slice:
        """Return the logit rows of decoding sequence `index`."""
        return slice(int(self.batch.query_start[index]), int(self.batch.query_start[index + 1]))

    def committed_rows(self, plan: StepPlan, *, wanted: Callable[[Sequence], bool]) -> Int32:
        """Return the rows of the pass whose tokens are now committed and cached."""
        kept: list[Int32] = []
        for index, sequence in enumerate(plan.sequences):
            if sequence.error is not None or not wanted(sequence):
                continue
            start, end = self.batch.query_start[index], self.batch.query_start[index + 1]
            first_position = int(self.batch.positions[start])
            kept.append(
                np.arange(start, min(end, start + sequence.cached_len - first_position), dtype=np.int32)
            )
        return np.concatenate(kept) if kept else np.zeros(0, np.int32)


def build_step_rows(plan: StepPlan, block: DraftBlock, verify_len: Int32, *, page_size: int) -> StepRows:
    """Flatten a plan: anchor and kept drafts of every decoding sequence, then the prefill chunks.

    Arguments:
        block: drafts of the decoding sequences, [R, G].
        verify_len: [R] drafts to verify; pages for them are held.
        page_size: tokens per cache page.
    """
    tokens: list[int] = []
    counts: list[int] = []
    starts: list[int] = []
    sequences: list[Sequence] = []
    for index, sequence in enumerate(plan.decoding):
        drafts = block.tokens[index, : verify_len[index]].tolist()
        tokens.append(sequence.token_ids[-1])
        tokens.extend(drafts)
        counts.append(1 + len(drafts))
        starts.append(sequence.cached_len)
        sequences.append(sequence)
    num_decoding_rows = len(tokens)
    for chunk in plan.prefill:
        tokens.extend(chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count])
        counts.append(chunk.count)
        starts.append(chunk.start)
        sequences.append(chunk.sequence)

    query_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_len = np.array(starts, np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T] sequence of each row
    positions = (np.arange(len(tokens)) - query_start[owner] + context_len[owner]).astype(np.int32)
    max_pages = max(sequence.num_pages for sequence in sequences)
    page_table = np.stack([sequence.page_row[:max_pages] for sequence in sequences])
    slots = page_table[owner, positions // page_size] * page_size + positions % page_size

    logit_rows = list(range(num_decoding_rows))
    first_token_rows: list[int] = []
    for index, chunk in enumerate(plan.prefill, start=len(plan.decoding)):
        if chunk.last:
            first_token_rows.append(len(logit_rows))
            logit_rows.append(int(query_start[index + 1]) - 1)
    return StepRows(
        batch=StepBatch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            query_start=query_start,
            context_len=context_len,
            page_table=page_table,
            slots=slots.astype(np.int32),
            logit_rows=np.array(logit_rows, np.int32),
        ),
        verify_len=verify_len,
        first_token_rows=tuple(first_token_rows),
    )
