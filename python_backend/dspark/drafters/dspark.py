"""DSpark: one parallel block pass, then G small steps that correct, sample and rate each position from left
to right.

The executor computes; this file decides what is drawn. Every draft goes through its request's own
`TokenSampler`, so the q that verification sees is the one the draft was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dspark.drafters.device_draws import (
    BlockDraws,
    SampledBlockExecutor,
    block_of,
    drawn_block,
    join_blocks,
)
from dspark.drafters.drawing import best_tokens, draw_draft
from dspark.drafters.greedy_confidence import log_q_of_best, rate_greedy
from dspark.drafters.interface import DraftBlock, DraftInput, DraftTree, GreedyBlockExecutor, TreeExecutor
from dspark.drafters.tree import BRANCH, WIDTH, grow_trees
from dspark.drafters.waiting_rows import WaitingRows
from dspark.executors.interface import BlockDrafterExecutor, DraftBatch, Float32, Int32
from dspark.executors.scheduled import BlockLauncher
from dspark.sampling.distribution import Distribution
from dspark.sampling.transforms import TokenSampler

__all__ = ["DSparkDrafter"]


class DSparkDrafter:
    """Drafts with a DFlash / DSpark checkpoint; a `Drafter`.

    Arguments:
        executor: runs the checkpoint.
        draft_to_target: [Vd] int32 ascending target ids of a reduced draft vocabulary, None for the full one.
    """

    name = "dspark"

    def __init__(self, executor: BlockDrafterExecutor, draft_to_target: Int32 | None = None) -> None:
        self.executor = executor
        self.tree_size = 0
        self.chain_len = self.block_size = executor.config.block_size  # G
        self.feature_layer_ids = executor.config.target_layer_ids
        self._waiting = WaitingRows()
        self.has_confidence = executor.config.enable_confidence_head
        self.draft_to_target = draft_to_target
        self._launched: tuple[DraftInput, ...] = ()

    def use_trees(self, size: int) -> None:
        """Draft trees of up to `size` nodes in steps where every sequence that drafts is plain greedy and may branch.

        `block_size` is then the larger of the two, and chains fill its first G entries.
        """
        self.tree_size = size
        self.block_size = max(self.chain_len, size)

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate the context cache beside the target's."""
        self.executor.allocate_cache(num_pages=num_pages, page_size=page_size)

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers."""
        return self.executor.cache_page_bytes(page_size)

    def observe(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Append the context of committed rows, at the latest before the next block."""
        self._waiting.add(features, positions, slots)
        if self._waiting.full:
            self._append_waiting()

    def _append_waiting(self) -> None:
        rows = self._waiting.take()
        if rows is None:
            return
        features, positions, slots = rows
        try:
            self.executor.append_context(features=features, positions=positions, slots=slots)
        except Exception:
            self._waiting.add(features, positions, slots)  # or pages would be shared that lack a row
            raise

    def release(self, sequence_id: int) -> None:
        """Keep nothing by sequence: the context lives in the sequence's pages."""

    def propose(self, inputs: Sequence[DraftInput]) -> DraftBlock:
        """Draft up to `max_drafts` tokens for each sequence; those that want none are not run."""
        block = DraftBlock.empty(len(inputs), self.block_size)
        rows = [row for row, item in enumerate(inputs) if item.max_drafts > 0]
        if not rows:
            return block
        self._append_waiting()
        active = [inputs[row] for row in rows]
        batch = _batch(active)
        greedy_alone = all(_plain_greedy(item.sampler) for item in active)
        if self.tree_size and greedy_alone and all(item.may_branch for item in active):
            found = self._grow_trees(active, batch)
            return found if len(rows) == len(inputs) else _spread(found, rows, block)
        num_drafts = np.array([min(item.max_drafts, self.chain_len) for item in active], np.int32)
        if isinstance(self.executor, GreedyBlockExecutor) and greedy_alone:
            greedy = self.executor.draft_greedy(batch, num_drafts=num_drafts)
            found = DraftBlock(
                tokens=greedy.tokens,
                num_tokens=greedy.num_tokens,
                distributions=None,
                confidence_logits=greedy.confidence_logits,
            )
        else:
            found = self._sample(active, batch, num_drafts)
        found = _widened(found, self.block_size)
        return found if len(rows) == len(inputs) else _spread(found, rows, block)

    # Blocks that nobody waits for

    def can_launch(self, inputs: Sequence[DraftInput]) -> bool:
        """Return whether the device draws all of these: chains, of requests that do not look at their text."""
        executor = self.executor
        return (
            isinstance(executor, BlockLauncher)
            and executor.launches
            and not self.tree_size
            and not any(item.sampler.alters(0) for item in inputs)
        )

    def launch(self, inputs: Sequence[DraftInput]) -> None:
        """Start one block for every sequence; those that want none draft nothing, from nothing."""
        executor = self.executor
        assert isinstance(executor, BlockLauncher)
        self._append_waiting()
        batch = _batch(inputs)
        num_drafts = np.array([min(item.max_drafts, self.chain_len) for item in inputs], np.int32)
        idle = num_drafts == 0
        if idle.any():
            batch = replace(
                batch,
                context_len=np.where(idle, np.int32(0), batch.context_len),
                page_table=np.where(idle[:, None], np.int32(-1), batch.page_table),
            )
        executor.launch(batch, num_drafts=num_drafts, draws=BlockDraws.of(item.sampler for item in inputs))
        self._launched = tuple(inputs)

    def collect(self) -> tuple[DraftBlock, float]:
        """Wait for the blocks."""
        assert isinstance(self.executor, BlockLauncher)
        found, draft_s = self.executor.collect()
        inputs, self._launched = self._launched, ()
        if found.confidence_logits is not None:
            found.confidence_logits[found.num_tokens == 0] = 0.0
        return block_of(found, inputs, self.draft_to_target), draft_s

    def _grow_trees(self, inputs: Sequence[DraftInput], batch: DraftBatch) -> DraftBlock:
        num_nodes = np.array([min(item.max_drafts, self.tree_size) for item in inputs], np.int32)
        if isinstance(self.executor, TreeExecutor) and self.executor.makes_trees:
            tree = self.executor.draft_tree(batch, num_nodes=num_nodes, width=WIDTH, branch=BRANCH)
        else:
            tree = grow_trees(self.executor, batch, num_nodes=num_nodes, draft_to_target=self.draft_to_target)
        tree = _wide_tree(tree, self.block_size)
        return DraftBlock(
            tokens=tree.tokens,
            num_tokens=tree.num_nodes,
            distributions=None,
            confidence_logits=None,
            tree=tree,
        )

    def _sample(self, inputs: Sequence[DraftInput], batch: DraftBatch, num_drafts: Int32) -> DraftBlock:
        """Draw where each sequence is drawn by itself: its drafts do not depend on what shares the batch."""
        drawn = drawn_block(self.executor, inputs, batch, num_drafts, self.draft_to_target)
        if drawn is not None:
            return drawn
        altered = np.array([item.sampler.alters(0) for item in inputs])
        mixed = altered.any() and not altered.all()
        if not mixed or not isinstance(self.executor, SampledBlockExecutor):
            return self._sample_block(inputs, batch, num_drafts)
        parts = []
        for chosen in (~altered, altered):
            rows = np.flatnonzero(chosen).tolist()
            own = [inputs[row] for row in rows]
            part = (own, _batch(own), num_drafts[rows])
            block = drawn_block(self.executor, *part, self.draft_to_target) or self._sample_block(*part)
            parts.append((rows, block))
        return join_blocks(parts, len(inputs))

    def _rated(self, k: int, inputs: Sequence[DraftInput], confidence: Float32, logits: Float32) -> Float32:
        """Return the confidence logits [R] of position k, given the head's own [R] and the draft logits [R, Vd]."""
        greedy = np.array([item.sampler.params.greedy for item in inputs])
        weights = self.executor.greedy_confidence
        if weights is None or not greedy.any():
            return confidence
        rated = confidence.copy()
        rated[greedy] = rate_greedy(weights[k], confidence[greedy], log_q_of_best(logits[greedy]))
        return rated

    def _sample_block(self, inputs: Sequence[DraftInput], batch: DraftBatch, num_drafts: Int32) -> DraftBlock:
        """Run the block pass and draw position after position over all sequences that still want one."""
        output = self.executor.draft(batch)
        num_sequences = len(inputs)
        tokens = np.zeros((num_sequences, self.chain_len), np.int32)
        num_tokens = np.zeros(num_sequences, np.int32)
        drawn: list[list[Distribution | None]] = [[] for _ in inputs]
        rated = np.zeros((num_sequences, self.chain_len), np.float32)
        has_confidence = False
        state = self.executor.initial_state(num_sequences)
        alive = np.arange(num_sequences)
        previous = batch.anchors
        for k in range(int(num_drafts.max())):
            keep = num_drafts[alive] > k
            alive, previous = alive[keep], previous[keep]
            state = None if state is None else state[keep]
            if not len(alive):
                break
            hidden = output.hidden[alive, k]
            bias, state = self.executor.head_step(previous=previous, hidden=hidden, state=state)
            confidence = self.executor.confidence_logits(previous=previous, hidden=hidden)
            logits = output.base_logits[alive, k]
            if bias is not None:
                logits = logits + bias
            ok = np.ones(len(alive), np.bool_)
            if confidence is not None:
                has_confidence = True
                rated[alive, k] = self._rated(k, [inputs[row] for row in alive], confidence, logits)
                ok = np.isfinite(confidence)
            best = best_tokens(logits, self.draft_to_target)
            for at, row in enumerate(alive):
                pick = None
                if ok[at]:
                    pick = draw_draft(
                        inputs[row],
                        logits[at],
                        best=int(best[at]),
                        drafted=tokens[row, :k].tolist(),
                        draft_to_target=self.draft_to_target,
                    )
                if pick is None:
                    ok[at] = False
                    continue
                tokens[row, k], distribution = pick
                drawn[row].append(distribution)
                num_tokens[row] = k + 1
            alive, previous = alive[ok], tokens[alive[ok], k]
            state = None if state is None else state[ok]
        one_hot = all(distribution is None for row in drawn for distribution in row)
        return DraftBlock(
            tokens=tokens,
            num_tokens=num_tokens,
            distributions=None if one_hot else tuple(tuple(row) for row in drawn),
            confidence_logits=rated if has_confidence else None,
        )


def _plain_greedy(sampler: TokenSampler) -> bool:
    """Return whether every draft is the bare arg-max; once past its minimum length a request stays so."""
    return sampler.params.greedy and not sampler.alters(0)


def _batch(inputs: Sequence[DraftInput]) -> DraftBatch:
    positions = np.array([len(item.token_ids) - 1 for item in inputs], np.int32)
    page_table = np.full((len(inputs), max(len(item.pages) for item in inputs)), -1, np.int32)
    for row, item in enumerate(inputs):
        page_table[row, : len(item.pages)] = item.pages
    return DraftBatch(
        anchors=np.array([item.token_ids[-1] for item in inputs], np.int32),
        anchor_positions=positions,
        context_len=positions,  # everything before the anchor was observed
        page_table=page_table,
    )


def _spread(found: DraftBlock, rows: list[int], empty: DraftBlock) -> DraftBlock:
    """Put the blocks of the sequences that drafted back among those that did not."""
    empty.tokens[rows] = found.tokens
    empty.num_tokens[rows] = found.num_tokens
    confidence = None
    if found.confidence_logits is not None:
        confidence = np.zeros(empty.tokens.shape, np.float32)
        confidence[rows] = found.confidence_logits
    distributions = None
    if found.distributions is not None:
        spread: list[Sequence[Distribution | None]] = [()] * len(empty.num_tokens)
        for row, of_row in zip(rows, found.distributions, strict=True):
            spread[row] = of_row
        distributions = tuple(spread)
    return DraftBlock(
        tokens=empty.tokens,
        num_tokens=empty.num_tokens,
        distributions=distributions,
        confidence_logits=confidence,
        tree=None if found.tree is None else _spread_tree(found.tree, rows, empty),
    )


def _spread_tree(tree: DraftTree, rows: list[int], empty: DraftBlock) -> DraftTree:
    """Put trees among sequences that have none: those look like chains of no drafts."""
    shape = empty.tokens.shape

    def spread(array: Any) -> Any:
        out = np.zeros(shape, array.dtype)
        out[rows] = array
        return out

    chain = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    parents, depths = chain - 1, chain.copy()
    parents[rows], depths[rows] = tree.parents, tree.depths
    return DraftTree(
        tokens=empty.tokens,
        parents=parents,
        depths=depths,
        ranks=spread(tree.ranks),
        log_q=spread(tree.log_q),
        rating=None if tree.rating is None else spread(tree.rating),
        num_nodes=empty.num_tokens,
    )


def _widened(block: DraftBlock, width: int) -> DraftBlock:
    """Return a block of `width` columns; those behind the chain mean nothing."""
    missing = width - block.tokens.shape[1]
    if not missing:
        return block
    rated = block.confidence_logits
    return replace(
        block,
        tokens=np.pad(block.tokens, ((0, 0), (0, missing))),
        confidence_logits=None if rated is None else np.pad(rated, ((0, 0), (0, missing))),
    )


def _wide_tree(tree: DraftTree, width: int) -> DraftTree:
    """Return a tree with room for `width` nodes; those that are not there mean nothing."""
    missing = width - tree.tokens.shape[1]
    if not missing:
        return tree
    room = ((0, 0), (0, missing))
    return DraftTree(
        tokens=np.pad(tree.tokens, room),
        parents=np.pad(tree.parents, room),
        depths=np.pad(tree.depths, room),
        ranks=np.pad(tree.ranks, room),
        log_q=np.pad(tree.log_q, room),
        rating=None if tree.rating is None else np.pad(tree.rating, room),
        num_nodes=tree.num_nodes,
    )
