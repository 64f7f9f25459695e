"""Launcher of `verify`."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.verify import chain_weights_kernel, row_limits_kernel, walk_kernel
from dspark_plugins.ops.launchers.start import DTYPE_NAMES, empty, start

__all__ = ["launch_verify"]


def launch_verify(
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
    """Do what `dspark::verify` says: one or two launches over all rows, one over all sequences."""
    num_rows, vocab_size = logits.shape
    num_sequences = len(positions)
    dtype = DTYPE_NAMES[logits.dtype]
    limits, bounds = empty(logits, torch.float32, num_rows, 3), empty(logits, torch.int32, num_rows, 3)
    start(
        row_limits_kernel,
        plans.row_limits(dtype=dtype),
        (num_rows,),
        *(logits, query_start, temperature, top_k, top_p, min_p, limits, bounds),
        *(num_sequences, vocab_size, logits.stride(0)),
    )
    has_probs, draft_vocab_size = draft_probs is not None, vocab_size
    mapped = has_probs and target_to_draft is not None
    inverse = tokens if target_to_draft is None else target_to_draft
    weights = empty(logits, torch.float32, num_rows, 2)
    if draft_probs is not None:
        draft_vocab_size = draft_probs.shape[1]
    if draft_probs is not None and prob_rows is not None and parents is None:
        start(
            chain_weights_kernel,
            plans.chain_weights(dtype=dtype, mapped=mapped),
            (num_rows,),
            *(logits, tokens, query_start, draft_probs, prob_rows, inverse, temperature, coupled),
            *(limits, bounds, weights, num_sequences, vocab_size, draft_vocab_size, logits.stride(0)),
            max_depth,
        )
    accepted = empty(tokens, torch.int32, num_sequences)
    path = empty(tokens, torch.int32, num_sequences, max_depth)
    next_token = empty(tokens, torch.int32, num_sequences)
    left = empty(logits, torch.float32, num_sequences, vocab_size)
    variant = plans.walk(
        dtype=dtype,
        tree=parents is not None,
        probs=has_probs,
        mapped=mapped,
    )
    start(
        walk_kernel,
        variant,
        (num_sequences,),
        *(logits, tokens, query_start, tokens if parents is None else parents),
        *(left if draft_probs is None else draft_probs, tokens if prob_rows is None else prob_rows),
        *(inverse, positions, seeds, temperature, coupled),
        *(limits, bounds, weights, left, accepted, path, next_token, vocab_size),
        *(draft_vocab_size, logits.stride(0), max_depth),
    )
    return accepted, path, next_token
