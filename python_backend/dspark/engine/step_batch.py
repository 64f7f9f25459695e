"""From a plan to the flattened rows of one target pass, and back from rows to sequences."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock, DraftTree
from dspark.engine.batching import StepPlan
from dspark.engine.sequence import Sequence
from dspark.executors.interface import Int32, StepBatch
from dspark.sampling.verification import Verdict

__all__ = ["StepRows", "build_prompt_rows", "build_step_rows"]


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

    def committed_rows(
        self,
        plan: StepPlan,
        verdicts: abc.Sequence[Verdict | None],
        *,
        wanted: Callable[[Sequence], bool],
    ) -> tuple[Int32, Int32]:
        """Return the rows of the pass whose tokens are now committed and cached, and the slots of their positions.

        Arguments:
            verdicts: of the decoding sequences.
        """
        num_rows = len(self.batch.positions)
        if num_rows == len(plan.decoding) and all(s.error is None and wanted(s) for s in plan.decoding):
            return np.arange(num_rows, dtype=np.int32), self.batch.slots.copy()  # anchors alone
        kept: list[int] = []
        places: list[int] = []
        starts, positions = self.batch.query_start.tolist(), self.batch.positions
        for index, sequence in enumerate(plan.sequences):
            if sequence.error is not None or not wanted(sequence):
                continue
            start, end = starts[index], starts[index + 1]
            rows = range(start, min(end, start + sequence.cached_len - int(positions[start])))
            places.extend(rows)
            verdict = verdicts[index] if index < len(verdicts) else None
            if verdict is not None and verdict.path and rows:
                kept.append(start)
                kept.extend(start + 1 + node for node in verdict.path[: len(rows) - 1])
            else:
                kept.extend(rows)
        return np.array(kept, np.int32), self.batch.slots[np.array(places, np.int32)]

    def moves(self, verdicts: abc.Sequence[Verdict | None]) -> tuple[Int32, Int32]:
        """Return from which slots to which the K/V of accepted nodes must go to lie in a row, in this order."""
        rows: list[int] = []
        places: list[int] = []
        for index, verdict in enumerate(verdicts):
            if verdict is None or not verdict.path:
                continue
            first = int(self.batch.query_start[index]) + 1
            for depth, node in enumerate(verdict.path):
                if node != depth:
                    rows.append(first + node)
                    places.append(first + depth)
        return self.batch.slots[rows], self.batch.slots[places]


def build_step_rows(plan: StepPlan, block: DraftBlock, verify_len: Int32, *, page_size: int) -> StepRows:
    """Flatten a plan: anchor and kept drafts of every decoding sequence, then the prefill chunks.

    Arguments:
        block: drafts of the decoding sequences, [R, G].
        verify_len: [R] drafts to verify; pages for them are held.
        page_size: tokens per cache page.
    """
    tokens = [
        [sequence.token_ids[-1], *block.tokens[index, : verify_len[index]].tolist()]
        for index, sequence in enumerate(plan.decoding)
    ]
    batch, first_token_rows = _flattened(plan, tokens, page_size=page_size)
    if block.tree is not None and _branches(block.tree, verify_len):
        counts = np.diff(batch.query_start).tolist()
        batch = replace(
            batch,
            positions=_tree_positions(
                block.tree, verify_len, batch.positions, batch.query_start, batch.context_len
            ),
            ancestors=_ancestors(block.tree, verify_len, counts),
        )
    return StepRows(batch=batch, verify_len=verify_len, first_token_rows=first_token_rows)


def build_prompt_rows(plan: StepPlan, *, page_size: int) -> StepBatch:
    """Flatten the prefill chunks alone: decoding sequences are among those of the pass, and have no rows yet."""
    return _flattened(plan, [[] for _ in plan.decoding], page_size=page_size)[0]


def _flattened(
    plan: StepPlan, decoding: abc.Sequence[list[int]], *, page_size: int
) -> tuple[StepBatch, tuple[int, ...]]:
    """Return the pass, and the index into its logits of each chunk that ends its prompt.

    Arguments:
        decoding: tokens of the rows of each decoding sequence; all of these rows have logits.
    """
    of_sequences = list(decoding)
    starts = [sequence.cached_len for sequence in plan.decoding]
    for chunk in plan.prefill:
        of_sequences.append(chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count])
        starts.append(chunk.start)
    counts = [len(of_one) for of_one in of_sequences]
    tokens = np.array([token for of_one in of_sequences for token in of_one], np.int32)

    query_start = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    context_len = np.array(starts, np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)  # [T] sequence of each row
    positions = (np.arange(len(tokens)) - query_start[owner] + context_len[owner]).astype(np.int32)
    sequences = plan.sequences
    max_pages = max(sequence.num_pages for sequence in sequences)
    page_table = np.stack([sequence.page_row[:max_pages] for sequence in sequences])
    slots = page_table[owner, positions // page_size] * page_size + positions % page_size

    logit_rows = list(range(query_start[len(plan.decoding)]))
    first_token_rows: list[int] = []
    for index, chunk in enumerate(plan.prefill, start=len(plan.decoding)):
        if chunk.last:
            first_token_rows.append(len(logit_rows))
            logit_rows.append(int(query_start[index + 1]) - 1)
    batch = StepBatch(
        tokens=tokens,
        positions=positions,
        query_start=query_start,
        context_len=context_len,
        page_table=page_table,
        slots=slots.astype(np.int32),
        logit_rows=np.array(logit_rows, np.int32),
    )
    return batch, tuple(first_token_rows)


def _branches(tree: DraftTree, verify_len: Int32) -> bool:
    """Return whether any of the verified trees is more than a chain."""
    at = np.arange(tree.parents.shape[1], dtype=np.int32)
    return bool(((tree.parents != at - 1) & (at < verify_len[:, None])).any())


def _tree_positions(
    tree: DraftTree, verify_len: Int32, places: Int32, query_start: Int32, context_len: Int32
) -> Int32:
    """Return the position of every row [T]: a node's is that of its depth, whatever slot it is written to."""
    positions = places.copy()
    for index, length in enumerate(verify_len.tolist()):
        first = int(query_start[index]) + 1
        positions[first : first + length] = context_len[index] + 1 + tree.depths[index, :length]
    return positions


def _ancestors(tree: DraftTree, verify_len: Int32, counts: abc.Sequence[int]) -> Int32:
    """Return the bit mask of every row [T, W] over the rows of its own sequence."""
    words = -(-max(counts) // 32)
    masks = np.zeros((sum(counts), words), np.uint32)
    chain = _chain_masks(max(counts), words)
    start = 0
    for index, count in enumerate(counts):
        if index >= len(verify_len):  # a prefill chunk
            masks[start : start + count] = chain[:count]
        else:
            seen = [1]  # the anchor sees itself
            for node, parent in enumerate(tree.parents[index, : count - 1].tolist()):
                seen.append(seen[parent + 1] | 1 << (node + 1))
            for word in range(words):
                masks[start : start + count, word] = [bits >> 32 * word & 0xFFFFFFFF for bits in seen]
        start += count
    return masks.view(np.int32)


def _chain_masks(num_rows: int, words: int) -> npt.NDArray[np.uint32]:
    """Return the masks of rows that each see themselves and those before them [num_rows, words]."""
    seen = np.tri(num_rows, words * 32, dtype=np.uint8)
    return np.packbits(seen, axis=1, bitorder="little").view(np.uint32)
