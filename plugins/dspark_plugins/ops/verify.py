"""`dspark::verify`: which drafts of chains and trees are accepted, and the token that the target adds."""

# ruff: noqa: ARG001  (a fake op takes what the op takes)

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.reference.verify import verify as plain

__all__ = ["verify"]


@torch.library.custom_op("dspark::verify", mutates_args=(), device_types="cpu")
def verify(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor | None,
    prob_rows: Tensor | None,
    target_to_draft: Tensor | None,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk every sequence's rows from its anchor: greedy at temperature 0, else coupled, as a block (chains with
    distributions) or by rejection.

    Rows from query_start[R] on are padding and are not read.

    Arguments:
        logits: [T, V] float32, float16 or bfloat16 of the target, a row for the anchor and each draft.
        tokens: [T] int32; the first row of a sequence is its anchor.
        query_start: [R+1] int32, rows of sequence i are query_start[i] : query_start[i+1].
        parents: [T] int32 row of the parent counted from the sequence's first, -1 for the anchor; parents come before
            their children. None for chains.
        draft_probs: [N, Vd] float32 distributions that drafts were drawn from, None = all one-hot.
        prob_rows: [T] int32 row of `draft_probs` of each draft, -1 = one-hot; None with `draft_probs`.
        target_to_draft: [V] int32 entry of every target token in a reduced draft vocabulary, -1 = none; None = the
            full one.
        positions: [R] int32 absolute position of the first drafted token (the anchor's + 1).
        seeds: [R] int64 request seeds.
        temperature, top_k, top_p, min_p, coupled: [R] as for `block_sample`.
        max_depth: longest path; deeper drafts are not looked at.

    Returns:
        accepted: [R] int32 drafts on the path.
        path: [R, max_depth] int32 their rows counted from the sequence's first, -1 behind them.
        next_token: [R] int32 the target's token behind the path; -1 where a row that was read is not finite (what is
            on the path was accepted before it) and for a sequence without rows.
    """
    return plain(
        logits,
        tokens,
        query_start,
        parents,
        draft_probs,
        prob_rows,
        target_to_draft,
        positions,
        seeds,
        temperature,
        top_k,
        top_p,
        min_p,
        coupled,
        max_depth,
    )


@verify.register_fake
def _(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor | None,
    prob_rows: Tensor | None,
    target_to_draft: Tensor | None,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    num_sequences = positions.shape[0]
    return (
        positions.new_empty((num_sequences,), dtype=torch.int32),
        positions.new_empty((num_sequences, max_depth), dtype=torch.int32),
        positions.new_empty((num_sequences,), dtype=torch.int32),
    )


@verify.register_kernel("cuda")
def _(
    logits: Tensor,
    tokens: Tensor,
    query_start: Tensor,
    parents: Tensor | None,
    draft_probs: Tensor | None,
    prob_rows: Tensor | None,
    target_to_draft: Tensor | None,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from dspark_plugins.ops.launchers.verify import launch_verify  # the Triton language, where there is a GPU

    return launch_verify(
        logits,
        tokens,
        query_start,
        parents,
        draft_probs,
        prob_rows,
        target_to_draft,
        positions,
        seeds,
        temperature,
        top_k,
        top_p,
        min_p,
        coupled,
        max_depth,
    )
