"""`dspark::block_sample`: the sequential head, sampling and confidence of whole blocks."""

# ruff: noqa: ARG001  (a fake op takes what the op takes)

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.reference.block_sample import block_sample as plain

__all__ = ["block_sample"]


@torch.library.custom_op("dspark::block_sample", mutates_args=(), device_types="cpu")
def block_sample(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    num_drafts: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    markov_in: Tensor | None,
    markov_out: Tensor | None,
    mix_weight: Tensor | None,
    mix_bias: Tensor | None,
    confidence_weight: Tensor | None,
    confidence_bias: Tensor | None,
    greedy_confidence: Tensor | None,
    draft_to_target: Tensor | None,
    previous_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw the drafts of R blocks from left to right, keep what they were drawn from, rate them.

    The head is vanilla without `mix_weight`, gated when it has r rows, an RNN when it has 3r; without `markov_in`
    there is none (DFlash). A row that is not finite (logits or confidence) ends its block.

    Arguments:
        base_logits: [R, G, Vd] float32, float16 or bfloat16.
        hidden: [R, G, d] of the head weights' dtype, after the drafter's final norm.
        anchors: [R] int32 target token ids.
        num_drafts: [R] int32 drafts wanted, at most G.
        positions: [R] int32 absolute position of the first drafted token (the anchor's + 1).
        seeds: [R] int64 request seeds.
        temperature: [R] float32; 0 = arg-max, the lowest entry among equals.
        top_k: [R] int32, 0 = all.
        top_p: [R] float32, 1 = all.
        min_p: [R] float32, 0 = all.
        coupled: [R] int32; not 0 = race with the noise that tokens own (named seed), else one uniform number of
            (seed, position, DRAFT, lane k) and inversion of the running total.
        markov_in: [rows, r] W1, or None.
        markov_out: [Vd, r] W2 transposed, or None.
        mix_weight, mix_bias: [r, d + r] and [r] over (h, W1[x]), or [3r, 2r + d] and [3r] over (state, W1[x], h) for
            gate, candidate, output; None = vanilla.
        confidence_weight: [d] or [d + r] over (h, W1[x]), or None.
        confidence_bias: [1] float32, or None.
        greedy_confidence: [G, 3] float32 with `confidence_weight`: an arg-max draft is rated w0 z + w1 logit q + w2,
            from the head's z and its own probability q; (1, 0, 0) leaves z.
        draft_to_target: [Vd] int32 target ids of a reduced vocabulary, None = the full one.
        previous_rows: [V] int32 row of `markov_in` of every target token, None = its own.

    Returns:
        tokens: [R, G] int32 target token ids, 0 from num_tokens on.
        num_tokens: [R] int32.
        draft_probs: [R, G, Vd] float32; undefined at temperature 0 and from num_tokens on.
        confidence_logits: [R, G] float32; 0 without a confidence head and from num_tokens on.
    """
    return plain(
        base_logits,
        hidden,
        anchors,
        num_drafts,
        positions,
        seeds,
        temperature,
        top_k,
        top_p,
        min_p,
        coupled,
        markov_in,
        markov_out,
        mix_weight,
        mix_bias,
        confidence_weight,
        confidence_bias,
        greedy_confidence,
        draft_to_target,
        previous_rows,
    )


@block_sample.register_fake
def _(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    num_drafts: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    markov_in: Tensor | None,
    markov_out: Tensor | None,
    mix_weight: Tensor | None,
    mix_bias: Tensor | None,
    confidence_weight: Tensor | None,
    confidence_bias: Tensor | None,
    greedy_confidence: Tensor | None,
    draft_to_target: Tensor | None,
    previous_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_sequences, block_size, _ = base_logits.shape
    return (
        anchors.new_empty((num_sequences, block_size), dtype=torch.int32),
        anchors.new_empty((num_sequences,), dtype=torch.int32),
        base_logits.new_empty(base_logits.shape, dtype=torch.float32),
        base_logits.new_empty((num_sequences, block_size), dtype=torch.float32),
    )


@block_sample.register_kernel("cuda")
def _(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    num_drafts: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    markov_in: Tensor | None,
    markov_out: Tensor | None,
    mix_weight: Tensor | None,
    mix_bias: Tensor | None,
    confidence_weight: Tensor | None,
    confidence_bias: Tensor | None,
    greedy_confidence: Tensor | None,
    draft_to_target: Tensor | None,
    previous_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from dspark_plugins.ops.launchers.block_sample import (
        launch_block_sample,
    )  # the Triton language, where there is a GPU

    return launch_block_sample(
        base_logits,
        hidden,
        anchors,
        num_drafts,
        positions,
        seeds,
        temperature,
        top_k,
        top_p,
        min_p,
        coupled,
        markov_in,
        markov_out,
        mix_weight,
        mix_bias,
        confidence_weight,
        confidence_bias,
        greedy_confidence,
        draft_to_target,
        previous_rows,
    )
