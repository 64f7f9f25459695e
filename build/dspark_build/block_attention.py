"""Attention of many training blocks over one shared context, with its gradient written out.

Each block sees the context rows before its anchor and every slot of its own block, nothing else. The blocks
of a sequence are taken in chunks of neighbouring anchors, so that a chunk only multiplies with the context
that its last anchor sees, and own-block scores cost G columns instead of one column per slot of the
sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["block_attention"]

CHUNK_BLOCKS = 16  # blocks that share one product with the context


def block_attention(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    *,
    context_start: tuple[int, ...],
    block_start: tuple[int, ...],
    anchor_positions: Tensor,
) -> Tensor:
    """Return the attention output [B, G, H, hd].

    Arguments:
        query: [B, G, H, hd], RoPE applied.
        context_key, context_value: [C, K, hd] rows of all sequences, position i of a sequence at row start
            + i.
        block_key, block_value: [B, G, K, hd].
        context_start, block_start: [S+1] rows and blocks of each sequence.
        anchor_positions: [B] ascending in each sequence; block b sees context rows 0 .. anchor - 1.
    """
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        query,
        context_key,
        context_value,
        block_key,
        block_value,
        context_start,
        block_start,
        anchor_positions,
    )
    return out


def _chunks(
    context_start: tuple[int, ...], block_start: tuple[int, ...], anchors: list[int]
) -> list[tuple[int, ...]]:
    """Return (first block, last block, first context row, visible context rows) of every chunk."""
    out: list[tuple[int, ...]] = []
    for s in range(len(block_start) - 1):
        for first in range(block_start[s], block_start[s + 1], CHUNK_BLOCKS):
            last = min(first + CHUNK_BLOCKS, block_start[s + 1])
            visible = min(anchors[last - 1], context_start[s + 1] - context_start[s])
            out.append((first, last, context_start[s], visible))
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        context_key: Tensor,
        context_value: Tensor,
        block_key: Tensor,
        block_value: Tensor,
        context_start: tuple[int, ...],
        block_start: tuple[int, ...],
        anchor_positions: Tensor,
    ) -> Tensor:
        B, G, H, hd = query.shape
        K = context_key.shape[1]
        group = H // K
        scale = hd**-0.5
        # Heads first and the query heads of a key head side by side: [K, B, G*group, hd].
        q = query.reshape(B, G, K, group, hd).permute(2, 0, 1, 3, 4).reshape(K, B, G * group, hd).mul(scale)
        ck, cv = (
            context_key.transpose(0, 1).contiguous(),
            context_value.transpose(0, 1).contiguous(),
        )  # [K, C, hd]
        bk, bv = (
            block_key.permute(2, 0, 1, 3).contiguous(),
            block_value.permute(2, 0, 1, 3).contiguous(),
        )  # [K, B, G, hd]
        out = torch.empty_like(q)
        chunks = _chunks(context_start, block_start, anchor_positions.tolist())
        weights = []
        for first, last, row, visible in chunks:
            n = last - first
            q_c = q[:, first:last].reshape(K, n * G * group, hd)
            own = torch.matmul(q[:, first:last], bk[:, first:last].transpose(2, 3))  # [K, n, Gg, G]
            seen = torch.bmm(q_c, ck[:, row : row + visible].transpose(1, 2))  # [K, n*Gg, visible]
            score = torch.cat([seen.view(K, n, G * group, visible), own], dim=-1).float()
            columns = torch.arange(visible, device=q.device)
            hidden = columns[None, :] >= anchor_positions[first:last, None]  # [n, visible]
            score[..., :visible].masked_fill_(hidden[None, :, None, :], float("-inf"))
            weight = torch.softmax(score, dim=-1).to(q.dtype)
            w_seen = weight[..., :visible].reshape(K, n * G * group, visible)
            value = torch.bmm(w_seen, cv[:, row : row + visible]).view(K, n, G * group, hd)
            out[:, first:last] = value + torch.matmul(weight[..., visible:], bv[:, first:last])
            weights.append(weight)
        ctx.save_for_backward(q, ck, cv, bk, bv, out, *weights)
        ctx.chunks, ctx.shape = chunks, (B, G, H, hd)
        return out.view(K, B, G, group, hd).permute(1, 2, 0, 3, 4).reshape(B, G, H, hd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, ck, cv, bk, bv, out, *weights = ctx.saved_tensors
        B, G, H, hd = ctx.shape
        K = ck.shape[0]
        group = H // K
        scale = hd**-0.5
        d_out = (
            grads[0]
            .reshape(B, G, K, group, hd)
            .permute(2, 0, 1, 3, 4)
            .reshape(K, B, G * group, hd)
            .to(q.dtype)
        )
        row_dot = (d_out.float() * out.float()).sum(-1, keepdim=True)  # [K, B, Gg, 1]
        d_q = torch.empty_like(q)
        d_ck, d_cv = torch.zeros_like(ck, dtype=torch.float32), torch.zeros_like(cv, dtype=torch.float32)
        d_bk, d_bv = torch.empty_like(bk), torch.empty_like(bv)
        for (first, last, row, visible), weight in zip(ctx.chunks, weights, strict=True):
            n = last - first
            rows = n * G * group
            g_out, q_c = d_out[:, first:last], q[:, first:last]
            flat_out, flat_q = g_out.reshape(K, rows, hd), q_c.reshape(K, rows, hd)
            d_weight = torch.cat(
                [
                    torch.bmm(flat_out, cv[:, row : row + visible].transpose(1, 2)).view(
                        K, n, G * group, visible
                    ),
                    torch.matmul(g_out, bv[:, first:last].transpose(2, 3)),
                ],
                dim=-1,
            ).float()
            d_score = d_weight.sub_(row_dot[:, first:last]).mul_(weight).to(q.dtype)
            seen = d_score[..., :visible].reshape(K, rows, visible)
            own = d_score[..., visible:]
            w_seen = weight[..., :visible].reshape(K, rows, visible)
            d_q[:, first:last] = torch.bmm(seen, ck[:, row : row + visible]).view(
                K, n, G * group, hd
            ) + torch.matmul(own, bk[:, first:last])
            d_ck[:, row : row + visible] += torch.bmm(seen.transpose(1, 2), flat_q)
            d_cv[:, row : row + visible] += torch.bmm(w_seen.transpose(1, 2), flat_out)
            d_bk[:, first:last] = torch.matmul(own.transpose(2, 3), q_c)
            d_bv[:, first:last] = torch.matmul(weight[..., visible:].transpose(2, 3), g_out)
        d_query = d_q.mul_(scale).view(K, B, G, group, hd).permute(1, 2, 0, 3, 4).reshape(B, G, H, hd)
        return (
            d_query,
            d_ck.to(q.dtype).transpose(0, 1),
            d_cv.to(q.dtype).transpose(0, 1),
            d_bk.permute(1, 2, 0, 3),
            d_bv.permute(1, 2, 0, 3),
            None,
            None,
            None,
        )
