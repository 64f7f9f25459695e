"""Launchers of `paged_attention` and `block_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.attention import attention_kernel, merge_splits_kernel, write_rows_kernel
from dspark_plugins.ops.launchers.start import DTYPE_NAMES, empty, start

__all__ = ["launch_block_attention", "launch_paged_attention"]


def launch_paged_attention(
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
    """Do what `dspark::paged_attention` says: one launch, two where long contexts are cut into pieces."""
    num_sequences, max_pages = page_table.shape
    num_rows, num_heads, head_dim = q.shape
    pieces = plans.num_splits(
        num_rows=num_rows, num_sequences=num_sequences, max_context=max_pages * page_size
    )
    variant = plans.attention(
        num_heads=num_heads,
        num_kv_heads=k.shape[1],
        head_dim=head_dim,
        dtype=DTYPE_NAMES[v.dtype],
        input_dtype=DTYPE_NAMES[q.dtype],
        rows=plans.cdiv(num_rows, max(num_sequences, 1)),
        fixed_rows=0,
        mask=plans.CHAIN if ancestors is None else plans.TREE,
        rope=cos is not None,
        window=window > 0,
        write=True,
        split=pieces > 1,
    )
    return _attend(
        variant,
        pieces,
        _rows(q),
        _rows(k),
        _rows(v),
        kv_cache,
        cos,
        sin,
        page_table,
        query_start,
        context_len,
        slots,
        positions,
        ancestors,
        page_size=page_size,
        scale=scale,
        window=window,
    )


def launch_block_attention(
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
    """Do what `dspark::block_attention` says: the new rows' launch, then the blocks'."""
    num_sequences, block_size, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    dtype, input_dtype = DTYPE_NAMES[v.dtype], DTYPE_NAMES[q.dtype]
    write = plans.write_rows(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        input_dtype=input_dtype,
        rope=cos is not None,
    )
    new_k, new_v = _rows(new_k), _rows(new_v)
    none = kv_cache  # never read
    start(
        write_rows_kernel,
        write,
        (plans.cdiv(len(new_slots), int(write.constants["BLOCK_ROWS"])), num_kv_heads),
        *(new_k, new_v, kv_cache, none if new_cos is None else new_cos, none if new_sin is None else new_sin),
        *(new_slots, len(new_slots), new_k.stride(0), new_v.stride(0)),
    )
    max_context = page_table.shape[1] * page_size
    pieces = plans.num_splits(
        num_rows=num_sequences * block_size, num_sequences=num_sequences, max_context=max_context
    )
    variant = plans.attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        input_dtype=input_dtype,
        rows=block_size,
        fixed_rows=block_size,
        mask=plans.FULL,
        rope=cos is not None,
        window=window > 0,
        write=False,
        split=pieces > 1,
    )
    out = _attend(
        variant,
        pieces,
        _rows(q.flatten(0, 1)),
        _rows(k.flatten(0, 1)),
        _rows(v.flatten(0, 1)),
        kv_cache,
        cos,
        sin,
        page_table,
        None,
        context_len,
        None,
        anchor_positions,
        None,
        page_size=page_size,
        scale=scale,
        window=window,
    )
    return out.view(q.shape)


def _attend(
    variant: plans.Variant,
    pieces: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    page_table: Tensor,
    query_start: Tensor | None,
    context_len: Tensor,
    slots: Tensor | None,
    positions: Tensor,
    ancestors: Tensor | None,
    *,
    page_size: int,
    scale: float,
    window: int,
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_sequences, max_pages = page_table.shape
    out = empty(v, v.dtype, num_rows, num_heads, head_dim)
    split = pieces > 1
    acc = empty(v, torch.float32, pieces, num_rows, num_heads, head_dim) if split else out
    ml = empty(v, torch.float32, pieces, num_rows, num_heads, 2) if split else out
    none = out  # stands in for what this form of the kernel does not read
    optional = [none if x is None else x for x in (cos, sin, query_start, slots, ancestors)]
    cos, sin, query_start, slots, masks = optional
    start(
        attention_kernel,
        variant,
        plans.attention_grid(variant, num_rows=num_rows, num_sequences=num_sequences, num_pieces=pieces),
        *(q, k, v, kv_cache, cos, sin, page_table, query_start, context_len, slots, positions, masks),
        *(out, acc, ml, num_sequences, num_rows, max_pages, q.stride(0), k.stride(0), v.stride(0)),
        *(masks.shape[1], page_size, scale, window, plans.SPLIT_LEN),
    )
    if split:
        merge = plans.merge_splits(num_heads=num_heads, head_dim=head_dim, dtype=DTYPE_NAMES[v.dtype])
        grid = (num_rows * num_heads,)
        start(merge_splits_kernel, merge, grid, acc, ml, out, num_rows, pieces)
    return out


def _rows(x: Tensor) -> Tensor:
    """Return [N, H, D] whose heads lie one behind the other; rows may be apart (views into a product)."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
