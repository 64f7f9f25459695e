"""The loss of algorithm.md, section 7, fused with the frozen LM head and the sequential head's output matrix.

    L = ce * CE(q, true token) + tv * ||q - p||_1 + kl * CE(q, p)

Logits over the draft vocabulary are made, used and dropped a few rows at a time, with the gradient written out: what
autograd would keep (several [slots, Vd] arrays) never exists. The target's distribution is recomputed from
its final hidden state and normalised over the *whole* vocabulary, so tokens the drafter cannot propose
count as rejected mass:

    acceptance = sum_in min(p, q) = 1 - 0.5 * (sum_in |p - q| + p_out)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["HeadInputs", "LossWeights", "SlotStats", "head_loss"]

CHUNK_SLOTS = 128  # slots whose logits exist at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How much each term counts; `decay` sets w_k = exp(-(k-1) / decay)."""

    ce: float = 0.1
    tv: float = 0.9
    kl: float = 0.0
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInputs:
    """What the loss knows of P slots beside their hidden states. Rows of the target are those of the packed
    batch.
    """

    head: Tensor  # [Vd, d] frozen LM head rows of the draft vocabulary, compute dtype
    labels: Tensor  # [P] int64 in draft ids, -1 where the true token is outside the draft vocabulary
    weight: Tensor  # [P] float32, w_k over its sum
    target_row: Tensor  # [P] int64, never far apart between neighbouring slots
    target_hidden: Tensor  # [U, d] compute dtype
    target_lse: Tensor  # [U] float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStats:
    """What was seen at each slot; carries no gradient."""

    acceptance: Tensor  # [P] 1 - TV
    label_prob: Tensor  # [P] q of the true token, 0 outside the draft vocabulary
    greedy: Tensor | None  # [P] int64 arg-max of q in draft ids, when asked for


def head_loss(
    hidden: Tensor,
    transition: Tensor | None,
    output_weight: Tensor | None,
    *,
    inputs: HeadInputs,
    weights: LossWeights,
    want_greedy: bool = False,
) -> tuple[Tensor, SlotStats]:
    """Return the weighted loss (without the confidence term) and what was seen at each slot.

    Arguments:
        hidden: [P, d] h_k.
        transition: [P, r] what the sequential head feeds to W2 at each slot, None at rank 0.
        output_weight: [Vd, r] W2 transposed, None at rank 0.
    """
    loss, acceptance, label_prob, greedy = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, transition, output_weight, inputs, weights, want_greedy
    )
    return loss, SlotStats(
        acceptance=acceptance, label_prob=label_prob, greedy=greedy if want_greedy else None
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        transition: Tensor | None,
        output_weight: Tensor | None,
        inputs: HeadInputs,
        weights: LossWeights,
        want_greedy: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = inputs.head.dtype
        num_slots, width = hidden.shape
        device = hidden.device
        want_grad = hidden.requires_grad or (transition is not None and transition.requires_grad)
        x = hidden.to(dtype)
        matrix = inputs.head
        if transition is not None:
            assert output_weight is not None, "a sequential head has an output matrix"
            x = torch.cat([x, transition.to(dtype)], dim=1)
            matrix = torch.cat([matrix, output_weight.to(dtype)], dim=1)
        d_x = torch.empty_like(x) if want_grad else None
        d_output = torch.zeros_like(output_weight) if want_grad and output_weight is not None else None
        acceptance = torch.empty(num_slots, device=device)
        label_prob = torch.empty(num_slots, device=device)
        greedy = torch.zeros(num_slots if want_greedy else 0, dtype=torch.int64, device=device)
        total = torch.zeros((), device=device)
        for first in range(0, num_slots, CHUNK_SLOTS):
            at = slice(first, min(first + CHUNK_SLOTS, num_slots))
            p = _target_probs(inputs, at)
            z = torch.matmul(x[at], matrix.t()).float()
            if want_greedy:
                greedy[at] = z.argmax(-1)
            soft_ce = None
            if weights.kl:
                p_in = p.sum(-1)
                soft_ce = p_in * z.logsumexp(-1) - (p * z).sum(-1)
            q = torch.softmax(z, -1)
            label = inputs.labels[at]
            known = label >= 0
            index = label.clamp(min=0)[:, None]
            q_label = torch.where(known, q.gather(1, index)[:, 0], torch.zeros((), device=device))
            torch.minimum(q, p, out=z)
            accepted = z.sum(-1)
            weight = inputs.weight[at]
            ce = torch.where(known, -torch.log(q_label.clamp(min=1e-30)), torch.zeros((), device=device))
            p_out_term = 2.0 * (1.0 - accepted)  # ||q - p||_1 over all of V
            term = weights.ce * ce + weights.tv * p_out_term
            if soft_ce is not None:
                term = term + weights.kl * soft_ce
            total += (weight * term).sum()
            acceptance[at], label_prob[at] = accepted, q_label
            if d_x is None:
                continue
            # d/dz of -2 tv sum min(p, q): with t = [q < p], -2 tv q (t - <q, t>).
            below = torch.where(q < p, q, torch.zeros((), device=device))
            scale = 2.0 * weights.tv * below.sum(-1) + weights.ce * known
            if weights.kl:
                scale = scale + weights.kl * p_in
            grad = q.mul_(scale[:, None]).add_(below, alpha=-2.0 * weights.tv)
            if weights.kl:
                grad.add_(p, alpha=-weights.kl)
            grad.scatter_add_(1, index, (-weights.ce * known.float())[:, None])
            g = grad.mul_(weight[:, None]).to(dtype)
            torch.matmul(g, matrix, out=d_x[at])
            if d_output is not None and transition is not None:
                d_output += torch.matmul(g.t(), x[at, width:])
        ctx.save_for_backward(*(t for t in (d_x, d_output) if t is not None))
        ctx.width, ctx.dtypes = width, (hidden.dtype, None if transition is None else transition.dtype)
        ctx.mark_non_differentiable(acceptance, label_prob, greedy)
        return total, acceptance, label_prob, greedy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_x = ctx.saved_tensors[0]
        scale = grads[0]
        hidden_dtype, transition_dtype = ctx.dtypes
        d_hidden = (d_x[:, : ctx.width] * scale).to(hidden_dtype)
        if transition_dtype is None:
            return d_hidden, None, None, None, None, None
        d_transition = (d_x[:, ctx.width :] * scale).to(transition_dtype)
        return d_hidden, d_transition, ctx.saved_tensors[1] * scale, None, None, None


def _target_probs(inputs: HeadInputs, at: slice) -> Tensor:
    """Return p over the draft vocabulary for the slots of a chunk [c, Vd], float32."""
    rows = inputs.target_row[at]
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low > rows.shape[0]:  # sparse anchors: one row for each slot is cheaper than the whole range
        logits = torch.matmul(inputs.target_hidden[rows], inputs.head.t()).float()
        return logits.sub_(inputs.target_lse[rows, None]).exp_()
    logits = torch.matmul(inputs.target_hidden[low:high], inputs.head.t()).float()
    return logits.sub_(inputs.target_lse[low:high, None]).exp_()[rows - low]
