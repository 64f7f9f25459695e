"""Trees of drafts out of one block: the likeliest paths are continued by their likeliest tokens, level after level.

Slot k of a block gives base logits that do not depend on the drafts before it; the sequential head makes them depend
on the last draft (and, with a state, on those before). So a path costs one row of that head, not a pass of the drafter,
and as the target's pass over a few more rows costs little, a second choice is often worth more than a deeper first one.

This is the plain form, for every head and executor; `TreeExecutor.draft_tree` is the fast one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.drafters.interface import DraftTree
from dspark.executors.interface import BlockDrafterExecutor, BlockOutput, DraftBatch, Float32, Int32

__all__ = ["BRANCH", "WIDTH", "collect_nodes", "grow_trees"]

WIDTH, BRANCH = 4, 4


@dataclass(frozen=True, slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    rank: int
    log_q: float
    path: float  # sum of log_q from the anchor
    rating: float


def grow_trees(
    executor: BlockDrafterExecutor,
    batch: DraftBatch,
    *,
    num_nodes: Int32,
    draft_to_target: Int32 | None,
    width: int = WIDTH,
    branch: int = BRANCH,
) -> DraftTree:
    """Return a tree of up to `num_nodes` [R] nodes for each sequence, as `TreeExecutor.draft_tree` does."""
    output = executor.draft(batch)
    levels = min(int(num_nodes.max()), executor.config.block_size)
    num_sequences = len(num_nodes)
    nodes: list[list[_Node]] = [[] for _ in range(num_sequences)]
    ends = [(row, -1) for row in range(num_sequences)]  # (sequence, node that a path ends in)
    state = executor.initial_state(num_sequences)
    rated = executor.config.enable_confidence_head
    for level in range(levels):
        if not ends:
            break
        first = [len(of_one) for of_one in nodes]
        state = _grow_level(executor, batch, output, nodes, ends, state, level, branch, draft_to_target)
        kept: list[tuple[int, int]] = []
        for row, of_one in enumerate(nodes):
            fresh = sorted(range(first[row], len(of_one)), key=lambda k: -of_one[k].path)
            kept += [(row, node) for node in fresh[:width]]
        if state is not None:
            where = {end: at for at, end in enumerate(ends)}
            state = state[[where[row, nodes[row][node].parent] for row, node in kept]]
        ends = kept
    return collect_nodes(nodes, num_nodes, rated=rated)


def _grow_level(
    executor: BlockDrafterExecutor,
    batch: DraftBatch,
    output: BlockOutput,
    nodes: list[list[_Node]],
    ends: list[tuple[int, int]],
    state: Float32 | None,
    level: int,
    branch: int,
    draft_to_target: Int32 | None,
) -> Float32 | None:
    """Append the children of all path ends at one level; return the head's state behind those ends [ends, r]."""
    rows = np.array([row for row, _ in ends])
    previous = np.array(
        [batch.anchors[row] if node < 0 else nodes[row][node].token for row, node in ends], np.int32
    )
    hidden = np.ascontiguousarray(output.hidden[rows, level])
    bias, after = executor.head_step(previous=previous, hidden=hidden, state=state)
    rating = executor.confidence_logits(previous=previous, hidden=hidden)
    logits = output.base_logits[rows, level] + (0.0 if bias is None else bias)
    for at, (row, node) in enumerate(ends):
        line = logits[at]
        if not np.isfinite(line).all():
            continue
        best = np.lexsort((np.arange(len(line)), -line))[:branch]  # among equals the lowest id
        most = line[best[0]]
        total = float(most + np.log(np.exp(line - most).sum()))
        path = 0.0 if node < 0 else nodes[row][node].path
        for rank, index in enumerate(best.tolist()):
            log_q = min(float(line[index]) - total, 0.0)
            nodes[row].append(
                _Node(
                    token=index if draft_to_target is None else int(draft_to_target[index]),
                    parent=node,
                    depth=level,
                    rank=rank,
                    log_q=log_q,
                    path=path + log_q,
                    rating=0.0 if rating is None else float(rating[at]),
                )
            )
    return after


def collect_nodes(nodes: list[list[_Node]], num_nodes: Int32, *, rated: bool) -> DraftTree:
    """Keep the likeliest nodes of each sequence, likeliest first; a child is never likelier than its parent."""
    shape = (len(nodes), int(num_nodes.max()))
    tokens, parents, depths, ranks = (np.zeros(shape, np.int32) for _ in range(4))
    log_q, rating = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    count = np.zeros(len(nodes), np.int32)
    for row, of_one in enumerate(nodes):
        order = sorted(range(len(of_one)), key=lambda k: -of_one[k].path)[: int(num_nodes[row])]
        place = {node: at for at, node in enumerate(order)}
        count[row] = len(order)
        for at, index in enumerate(order):
            node = of_one[index]
            tokens[row, at], parents[row, at] = node.token, place.get(node.parent, -1)
            depths[row, at], ranks[row, at] = node.depth, node.rank
            log_q[row, at], rating[row, at] = node.log_q, node.rating
    return DraftTree(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ranks=ranks,
        log_q=log_q,
        rating=rating if rated else None,
        num_nodes=count,
    )
