"""`dspark::block_attention`: one drafter layer, from the new context rows to the attended block."""

# ruff: noqa: ARG001  (a fake op takes what the op takes)

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.reference.block_attention import block_attention as plain
from dspark_plugins.reference.rope import rotate

__all__ = ["block_attention"]


@torch.library.custom_op("dspark::block_attention", mutates_args=("kv_cache",), device_types="cpu")
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    new_k: Tensor,
    new_v: Tensor,
    new_cos: Tensor | None,
    new_sin: Tensor | None,
    new_slots: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    anchor_positions: Tensor,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    """Write the keys and values of newly committed rows, then attend from every slot to context and whole block.

    The block's own keys and values are written nowhere. R = 0 writes alone, N = 0 attends alone.

    Arguments:
        q: [R, G, Hq, D] float32, float16 or bfloat16.
        k: [R, G, Hkv, D] of q's dtype; Hkv divides Hq.
        v: [R, G, Hkv, D] of the cache's dtype.
        kv_cache: [num_slots, 2, Hkv, D] context keys and values of this layer, written in place.
        cos, sin: [R, G, D/2] float32 RoPE tables of the slots; both None = q and k are rotated already.
        new_k: [N, Hkv, D] of q's dtype, of the newly committed rows; they count in `context_len`.
        new_v: [N, Hkv, D] of the cache's dtype.
        new_cos, new_sin: [N, D/2] float32; None where cos and sin are None.
        new_slots: [N] int32 cache slots; a negative one is padding and is not written.
        page_table: [R, P] int32 page ids; entries past a context's last page are ignored, whatever they hold.
        context_len: [R] int32 context rows, the new ones included; row j has position j.
        anchor_positions: [R] int32; slot g has position anchor + g. Only the window looks at them.
        page_size: rows of a page.
        scale: multiplies the scores.
        window: slot g sees context rows nearer than this (position - j < window) and all of its block; 0 = all.

    Returns:
        [R, G, Hq, D] of v's dtype.
    """
    if cos is not None and sin is not None and new_cos is not None and new_sin is not None:
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        new_k = rotate(new_k, new_cos[:, None], new_sin[:, None])
    real = new_slots >= 0
    at = new_slots[real].long()
    kv_cache[at, 0], kv_cache[at, 1] = new_k[real].to(kv_cache.dtype), new_v[real]
    scaled = q.float() * (scale * q.shape[-1] ** 0.5)  # the plain version scales by 1 / sqrt(D)
    attended = plain(
        scaled,
        k.to(v.dtype).float(),
        v.float(),
        kv_cache[:, 0].float(),
        kv_cache[:, 1].float(),
        page_table=page_table,
        context_len=context_len,
        anchor_positions=anchor_positions,
        page_size=page_size,
        window=window or None,
    )
    return attended.to(v.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [R, G, H, D] float32 rotated by tables [R, G, D/2]."""
    return rotate(heads.flatten(0, 1), cos.flatten(0, 1)[:, None], sin.flatten(0, 1)[:, None]).view(
        heads.shape
    )


@block_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    new_k: Tensor,
    new_v: Tensor,
    new_cos: Tensor | None,
    new_sin: Tensor | None,
    new_slots: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    anchor_positions: Tensor,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    return q.new_empty(q.shape, dtype=v.dtype)


@block_attention.register_kernel("cuda")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    new_k: Tensor,
    new_v: Tensor,
    new_cos: Tensor | None,
    new_sin: Tensor | None,
    new_slots: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    anchor_positions: Tensor,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    from dspark_plugins.ops.launchers.attention import (
        launch_block_attention,
    )  # the Triton language, where there is a GPU

    return launch_block_attention(
        q,
        k,
        v,
        kv_cache,
        cos,
        sin,
        new_k,
        new_v,
        new_cos,
        new_sin,
        new_slots,
        page_table,
        context_len,
        anchor_positions,
        page_size,
        scale,
        window,
    )
