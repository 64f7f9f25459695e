"""Drafter attention in plain torch: a block looks at its cached context and at all of itself. The truth for
kernels.

Queries and block keys come with RoPE applied. Knows nothing of layers, weights or who owns the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["block_attention"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor,
    context_len: Tensor,
    anchor_positions: Tensor,
    page_size: int,
    window: int | None = None,
) -> Tensor:
    """Attend from every slot of every block to the block's context and to the whole block.

    Sequences are taken together by power-of-two classes of their context length, so that padding at most
    doubles the rows read and one long context does not cost the short ones.

    Arguments:
        q: [R, G, Hq, D].
        k, v: [R, G, Hkv, D] of the block itself; Hkv divides Hq.
        k_cache, v_cache: [num_slots, Hkv, D]; slot = page * page_size + offset.
        page_table: [R, P] integer page ids; entries past the last page are ignored, whatever they hold.
        context_len: [R] integer; context row j of a sequence has position j.
        anchor_positions: [R] integer; slot g has position anchor + g. Only the window looks at it.
        page_size: rows of a page.
        window: slot g sees context rows nearer than this (position - j < window); None sees all.

    Returns:
        [R, G, Hq, D] in q's dtype.
    """
    out = torch.empty_like(q)
    lengths = context_len.tolist()
    classes: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        classes.setdefault(int(length).bit_length(), []).append(row)
    for rows in classes.values():
        longest = max(lengths[row] for row in rows)
        equal = all(lengths[row] == longest for row in rows)
        index = torch.tensor(rows, device=q.device)
        context, visible = _context(
            page_table[index],
            context_len[index],
            longest,
            page_size,
            need_mask=not equal or window is not None,
        )
        if window is not None:
            visible = _in_window(visible, anchor_positions[index], q.shape[1], window)
        out[index] = _attend(q[index], k[index], v[index], k_cache[context], v_cache[context], visible)
    return out


def _context(
    page_table: Tensor, context_len: Tensor, longest: int, page_size: int, *, need_mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Return slots [n, C] and visibility [n, 1, C]; rows past a context repeat its last slot, which holds
    real values."""
    position = torch.arange(longest, device=page_table.device)
    clamped = torch.minimum(position[None], (context_len[:, None] - 1).clamp_min(0)).long()
    slots = page_table.long().gather(1, clamped // page_size) * page_size + clamped % page_size
    return slots, (position[None] < context_len[:, None])[:, None] if need_mask else None


def _in_window(visible: Tensor | None, anchors: Tensor, block_size: int, window: int) -> Tensor:
    """Return visibility [n, G, C] of context rows under a sliding window."""
    assert visible is not None
    slot = torch.arange(block_size, device=anchors.device)
    column = torch.arange(visible.shape[-1], device=anchors.device)
    near = anchors[:, None, None] + slot[None, :, None] - column[None, None] < window
    return visible & near


def _attend(
    q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor, visible: Tensor | None
) -> Tensor:
    """Attend [n, G, Hq, D] over [n, C, Hkv, D] and [n, G, Hkv, D]; `visible` is [n, 1 or G, C] or None for
    all."""
    n, block_size, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    keys = torch.cat([context_k, k], dim=1).transpose(1, 2)
    values = torch.cat([context_v, v], dim=1).transpose(1, 2)
    # Query heads that share a key head become rows of it, so keys are read once and never repeated.
    rows = q.view(n, block_size, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(n, num_kv_heads, group * block_size, head_dim)
    mask = None
    if visible is not None:
        own = visible.new_ones(n, visible.shape[1], block_size)
        mask = torch.cat([visible, own], dim=-1)
        if mask.shape[1] == block_size:
            mask = mask.repeat(1, group, 1)
        mask = mask[:, None]
    attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    attended = attended.view(n, num_kv_heads, group, block_size, head_dim).permute(0, 3, 1, 2, 4)
    return attended.reshape(n, block_size, num_heads, head_dim)
