"""Plain version of the `block_sample` op: correct, rate and draw the positions of every block from left to right.

Formulas: docs of the sequential and the confidence head in the drafter's own files; DSpark (arXiv 2607.05147).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from dspark_plugins.reference.sampling import DRAFT, draw, truncated_weights

__all__ = ["BlockSampleOutput", "block_sample"]


class BlockSampleOutput(NamedTuple):
    """Drafts of R blocks."""

    tokens: Tensor  # [R, G] int32 target token ids, 0 from num_tokens on
    num_tokens: Tensor  # [R] int32, fewer than asked for where a row was not finite
    draft_probs: Tensor  # [R, G, Vd] float32 q; undefined at temperature 0 and from num_tokens on
    confidence_logits: Tensor  # [R, G] float32; 0 without a confidence head and from num_tokens on


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
) -> BlockSampleOutput:
    """Draw G tokens for every sequence; arguments and shapes are those of `dspark_plugins.ops.block_sample`."""
    num_sequences, block_size, vocab_size = base_logits.shape
    entries = torch.arange(vocab_size, device=base_logits.device)
    token_ids = entries if draft_to_target is None else draft_to_target.long()
    tokens = torch.zeros(num_sequences, block_size, dtype=torch.int32, device=base_logits.device)
    confidence = torch.zeros(num_sequences, block_size, device=base_logits.device)
    probs = torch.zeros(base_logits.shape, device=base_logits.device)
    num_tokens = torch.zeros_like(num_drafts)
    state = None if markov_in is None else markov_in.new_zeros(num_sequences, markov_in.shape[1])
    previous = anchors.long()
    alive = torch.ones(num_sequences, dtype=torch.bool, device=base_logits.device)
    for k in range(block_size):
        embedded = None
        logits = base_logits[:, k].float()
        if markov_in is not None and markov_out is not None and state is not None:
            embedded = markov_in[previous if previous_rows is None else previous_rows.long()[previous]]
            mixed, state = _mixed(embedded, hidden[:, k], state, mix_weight, mix_bias)
            logits = logits + linear(mixed, markov_out).float()
        rated = _confidence(embedded, hidden[:, k], confidence_weight, confidence_bias)
        if rated is not None and greedy_confidence is not None:
            rated = torch.where(temperature > 0, rated, _greedy(greedy_confidence[k], rated, logits))
        log_weights, finite = truncated_weights(logits, temperature, top_k, top_p, min_p)
        alive = alive & finite & (num_drafts > k) & (rated.isfinite() if rated is not None else True)
        entry = draw(
            log_weights,
            token_ids,
            seed=seeds,
            position=positions.long() + k,
            coupled=coupled.bool(),
            purpose=DRAFT,
            lane=k,
        )
        weights = log_weights.double().exp()
        probs[:, k] = torch.where(alive[:, None], weights / weights.sum(dim=1, keepdim=True), 0.0).float()
        if rated is not None:
            confidence[:, k] = torch.where(alive, rated, 0.0)
        previous = torch.where(alive, token_ids[entry], previous)
        tokens[:, k] = torch.where(alive, token_ids[entry], 0).to(torch.int32)
        num_tokens = num_tokens + alive.to(num_tokens.dtype)
    return BlockSampleOutput(tokens, num_tokens.to(torch.int32), probs, confidence)


def _mixed(
    embedded: Tensor, hidden: Tensor, state: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what multiplies the output matrix [R, r] and the next state; the shape of `weight` tells the head."""
    if weight is None:
        return embedded, state
    if len(weight) == embedded.shape[1]:
        gate = torch.sigmoid(linear(torch.cat([hidden, embedded], -1), weight, bias))
        return gate * embedded, state
    gate, candidate, output = linear(torch.cat([state, embedded, hidden], -1), weight, bias).chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


def _confidence(
    embedded: Tensor | None, hidden: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Return the confidence logits [R] float32; a weight longer than `hidden` looks at W1[x] too."""
    if weight is None:
        return None
    seen = hidden if embedded is None or len(weight) == hidden.shape[1] else torch.cat([hidden, embedded], -1)
    rated = (seen @ weight).float()
    return rated if bias is None else rated + bias.float()


def _greedy(weights: Tensor, rated: Tensor, logits: Tensor) -> Tensor:
    """Return w0 z + w1 logit q + w2 [R] of the likeliest entry of logits [R, Vd]; 1 - q counts as 1e-4 at least."""
    log_q = (logits.amax(dim=1) - logits.logsumexp(dim=1)).clamp(max=0.0)
    logit = log_q - torch.log((-torch.expm1(log_q)).clamp(min=1e-4))
    return weights[0] * rated + weights[1] * logit + weights[2]
