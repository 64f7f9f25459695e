"""`dspark::paged_attention`: RoPE, writing and attending of one target layer over a ragged batch."""

# ruff: noqa: ARG001  (a fake op takes what the op takes)

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.reference import paged_attention as plain
from dspark_plugins.reference.rope import rotate

__all__ = ["paged_attention"]


@torch.library.custom_op("dspark::paged_attention", mutates_args=("kv_cache",), device_types="cpu")
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    slots: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    """Rotate q and k, write k and v into their slots, attend over cached context and own rows.

    Rows from query_start[R] on are padding (fixed shapes of a captured graph): nothing is written for them and
    their output is undefined. Sequences without rows are allowed, and so is T = 0.

    Arguments:
        q: [T, Hq, D] float32, float16 or bfloat16.
        k: [T, Hkv, D] of q's dtype; Hkv divides Hq.
        v: [T, Hkv, D] of the cache's dtype.
        kv_cache: [num_slots, 2, Hkv, D] keys and values of this layer, written in place; slot = page * page_size +
            offset.
        cos, sin: [T, D/2] float32 RoPE tables of the rows (half-split kind); both None = q and k are rotated already.
        page_table: [R, P] int32 page ids; entries past a context's last page are ignored, whatever they hold.
        query_start: [R+1] int32, rows of sequence i are query_start[i] : query_start[i+1].
        context_len: [R] int32 tokens in the cache before this pass, at most P * page_size.
        slots: [T] int32 slot that each row's k and v go to; never one of a cached token.
        positions: [T] int32 absolute positions; only the window looks at them. Cached token j has position j.
        ancestors: [T, W] int32 bit masks over the sequence's own rows (bit j % 32 of word j // 32 = row j), None for
            chains (a row sees itself and the rows before it). Every row sees itself.
        page_size: rows of a page.
        scale: multiplies the scores.
        window: a row sees positions above its own less this many; 0 = all.

    Returns:
        [T, Hq, D] of v's dtype.
    """
    num_rows = int(query_start[-1])
    num_kv_heads, dim = k.shape[1:]
    q, k, v = q[:num_rows], k[:num_rows], v[:num_rows]
    if cos is not None and sin is not None:
        tables = cos[:num_rows, None], sin[:num_rows, None]
        q, k = rotate(q, *tables), rotate(k, *tables)
    out = torch.zeros(len(slots), q.shape[1], dim, dtype=v.dtype)
    if not num_rows:
        return out
    plain.write_cache(
        kv_cache,
        torch.stack([k.to(v.dtype), v], dim=1).view(-1, 2, num_kv_heads, dim),
        slots[:num_rows].long(),
    )
    plan = plain.plan_attention(
        query_start=query_start.numpy(),
        context_len=context_len.numpy(),
        page_table=page_table.numpy(),
        page_size=page_size,
        slots=slots[:num_rows].numpy(),
        positions=positions[:num_rows].numpy(),
        ancestors=None if ancestors is None else ancestors[:num_rows].numpy(),
        sliding_window=window or None,
        dtype=v.dtype,
    )
    attended = plain.paged_attention(q.to(v.dtype), kv_cache, plan, scale=scale)
    out[:num_rows] = attended.view(num_rows, -1, dim)
    return out


@paged_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    slots: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    return q.new_empty(q.shape, dtype=v.dtype)


@paged_attention.register_kernel("cuda")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    page_table: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    slots: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    from dspark_plugins.ops.launchers.attention import (
        launch_paged_attention,
    )  # the Triton language, where there is a GPU

    return launch_paged_attention(
        q,
        k,
        v,
        kv_cache,
        cos,
        sin,
        page_table,
        query_start,
        context_len,
        slots,
        positions,
        ancestors,
        page_size,
        scale,
        window,
    )
