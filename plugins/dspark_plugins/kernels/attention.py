"""Device code of both attentions: ragged query rows over paged context and over rows that are not cached yet.

One program takes a tile of (row, query head) pairs that share a key head, walks the context's pages, then the rows of
its own sequence, which it reads from the inputs (rotating them on the way), so that writing the cache and attending
need no barrier between them. The softmax is the running one (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention,
arXiv 2205.14135). With `SPLIT` a long context is cut into pieces of fixed length that other programs take, and
`merge_splits_kernel` joins them in a fixed order: the pieces do not depend on the batch.
"""

# ruff: noqa: E741, SIM102  (m, l: the names of the papers; a compile-time test and a run-time one)

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attention_kernel", "merge_splits_kernel", "write_rows_kernel"]


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated_rows(
    base, stride, rows, row_mask, head, cos, sin, DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr
):
    """Load rows of one head, [N, BLOCK_D] float32, rotated; element j pairs with element j + DIM / 2."""
    d = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (d < DIM)[None, :]
    at = base + (rows.to(tl.int64) * stride)[:, None] + (head * DIM)[:, None]
    x = tl.load(at + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROPE:
        HALF: tl.constexpr = DIM // 2
        pair = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(at + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        table = (rows.to(tl.int64) * HALF)[:, None] + (d % HALF)[None, :]
        c = tl.load(cos + table, mask=mask, other=0.0)
        s = tl.load(sin + table, mask=mask, other=0.0)
        x = x * c + tl.where(d < HALF, -1.0, 1.0)[None, :] * (y * s)
    return x


@triton.jit
def _sequence_of_tile(query_start, num_sequences, tile, BLOCK_ROWS: tl.constexpr):
    """Return the last i with query_start[i] // BLOCK_ROWS + i <= tile: where each sequence's tiles begin."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(q, keys, values, seen, m, l, acc, scale_log2, DOT: tl.constexpr):
    """Take one tile of keys into the running softmax."""
    scores = tl.dot(q, tl.trans(keys), input_precision=DOT) * scale_log2
    scores = tl.where(seen, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    l = l * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision=DOT)
    return m_new, l, acc


@triton.jit
def attention_kernel(
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
    out,
    partial_acc,
    partial_ml,
    num_sequences,
    num_rows_total,
    max_pages,
    q_stride,
    k_stride,
    v_stride,
    ancestor_words,
    page_size,
    scale,
    window,
    split_len,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIXED_ROWS: tl.constexpr,
    MASK: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    WRITE: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend for one tile of one key head; grid (tiles, NUM_KV_HEADS, splits).

    Arguments are those of the ops; `positions` is [T], or with FIXED_ROWS (rows of every sequence) the anchors' [R].
    `partial_acc` [splits, T, Hq, D] and `partial_ml` [splits, T, Hq, 2] float32 are used with SPLIT alone.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if FIXED_ROWS > 0:
        TILES: tl.constexpr = (FIXED_ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
        sequence = tile // TILES
        start = sequence * FIXED_ROWS
        num_rows = FIXED_ROWS
        first = (tile % TILES) * BLOCK_ROWS
    else:
        sequence = _sequence_of_tile(query_start, num_sequences, tile, BLOCK_ROWS)
        start = tl.load(query_start + sequence)
        num_rows = tl.load(query_start + sequence + 1) - start
        first = (tile - start // BLOCK_ROWS - sequence) * BLOCK_ROWS
    if first >= num_rows:
        return

    dtype = kv_cache.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    m_index = tl.arange(0, BLOCK_M)
    row = first + m_index // GROUP  # of its sequence
    head = kv_head * GROUP + m_index % GROUP
    valid = (m_index < BLOCK_ROWS * GROUP) & (row < num_rows)
    queries = _rotated_rows(q, q_stride, start + row, valid, head, cos, sin, DIM, BLOCK_D, ROPE).to(dtype)
    context = tl.load(context_len + sequence)
    scale_log2 = scale * _LOG2_E
    at = tl.zeros([BLOCK_M], tl.int32)  # absolute position of every row
    if WINDOW:
        if FIXED_ROWS > 0:
            at = tl.load(positions + sequence) + row
        else:
            at = tl.load(positions + start + row, mask=valid, other=2147483647)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = 0
    high = context
    if SPLIT:
        low = split * split_len
        high = tl.minimum(context, low + split_len)
    if WINDOW:
        nearest = tl.min(at, axis=0) - window + 1
        low = tl.maximum(low, (tl.maximum(nearest, 0) // BLOCK_N) * BLOCK_N)
    for n0 in range(low, high, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        real = n < high
        page = tl.load(page_table + sequence.to(tl.int64) * max_pages + n // page_size, mask=real, other=0)
        slot = page.to(tl.int64) * page_size + n % page_size
        source = kv_cache + (slot * 2 * NUM_KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
        mask = real[:, None] & (d < DIM)[None, :]
        keys = tl.load(source, mask=mask, other=0.0)
        values = tl.load(source + NUM_KV_HEADS * DIM, mask=mask, other=0.0)
        seen = real[None, :] & valid[:, None]
        if WINDOW:
            seen = seen & (n[None, :] > at[:, None] - window)
        m, l, acc = _attend(queries, keys, values, seen, m, l, acc, scale_log2, DOT)

    own_end = num_rows
    if MASK == 0:
        own_end = tl.minimum(num_rows, first + BLOCK_ROWS)
    if SPLIT:
        own_end = tl.where(split == 0, own_end, 0)
    for j0 in tl.range(
        0, own_end, BLOCK_N, num_stages=1
    ):  # few rounds; copies ahead would cost shared memory
        j = j0 + tl.arange(0, BLOCK_N)
        real = j < own_end
        own_head = tl.zeros([BLOCK_N], tl.int32) + kv_head
        keys = _rotated_rows(k, k_stride, start + j, real, own_head, cos, sin, DIM, BLOCK_D, ROPE).to(dtype)
        values = _rotated_rows(v, v_stride, start + j, real, own_head, cos, sin, DIM, BLOCK_D, False).to(
            dtype
        )
        seen = real[None, :] & valid[:, None]
        if MASK == 0:
            seen = seen & (j[None, :] <= row[:, None])
        if MASK == 1:
            word = ((start + row).to(tl.int64) * ancestor_words)[:, None] + (j // 32)[None, :]
            bits = tl.load(ancestors + word, mask=seen, other=0)
            seen = seen & (((bits >> (j % 32)[None, :]) & 1) != 0)
        if WINDOW and FIXED_ROWS == 0:
            key_at = tl.load(positions + start + j, mask=real, other=0)
            seen = seen & (key_at[None, :] > at[:, None] - window)
        m, l, acc = _attend(queries, keys, values, seen, m, l, acc, scale_log2, DOT)

    target = ((start + row).to(tl.int64) * NUM_HEADS + head)[:, None] * DIM + d[None, :]
    out_mask = valid[:, None] & (d < DIM)[None, :]
    if SPLIT:
        partial = split.to(tl.int64) * num_rows_total * NUM_HEADS
        flat = partial + (start + row).to(tl.int64) * NUM_HEADS + head
        tl.store(partial_ml + flat * 2, m, mask=valid)
        tl.store(partial_ml + flat * 2 + 1, l, mask=valid)
        if (low < high) | (split == 0):
            tl.store(partial_acc + partial * DIM + target, acc, mask=out_mask)
    else:
        l = tl.where(valid, l, 1.0)
        tl.store(out + target, (acc / l[:, None]).to(dtype), mask=out_mask)

    if WRITE:
        if split == 0:
            # Every row of the tile once, whatever the number of query heads.
            r = first + m_index
            mine = (m_index < BLOCK_ROWS) & (r < num_rows)
            its_head = tl.zeros([BLOCK_M], tl.int32) + kv_head
            its_slot = tl.load(slots + start + r, mask=mine, other=0).to(tl.int64)
            place = kv_cache + (its_slot * 2 * NUM_KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
            place_mask = mine[:, None] & (d < DIM)[None, :]
            key = _rotated_rows(k, k_stride, start + r, mine, its_head, cos, sin, DIM, BLOCK_D, ROPE)
            tl.store(place, key.to(dtype), mask=place_mask)
            value = _rotated_rows(v, v_stride, start + r, mine, its_head, cos, sin, DIM, BLOCK_D, False)
            tl.store(place + NUM_KV_HEADS * DIM, value.to(dtype), mask=place_mask)


@triton.jit
def merge_splits_kernel(
    partial_acc,
    partial_ml,
    out,
    num_rows_total,
    num_splits,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Join the pieces of one row and head, in order; grid (T * NUM_HEADS,). Empty pieces have m = -inf."""
    pair = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    m = tl.load(partial_ml + pair * 2)
    l = tl.load(partial_ml + pair * 2 + 1)
    acc = tl.load(partial_acc + pair * DIM + d, mask=inside, other=0.0)
    at = pair
    for _ in range(1, num_splits):
        at += num_rows_total * NUM_HEADS
        m_piece = tl.load(partial_ml + at * 2)
        if m_piece > float("-inf"):
            l_piece = tl.load(partial_ml + at * 2 + 1)
            piece = tl.load(partial_acc + at * DIM + d, mask=inside, other=0.0)
            m_new = tl.maximum(m, m_piece)
            shrink, grow = tl.exp2(m - m_new), tl.exp2(m_piece - m_new)
            l = l * shrink + l_piece * grow
            acc = acc * shrink + piece * grow
            m = m_new
    tl.store(out + pair * DIM + d, (acc / l).to(out.dtype.element_ty), mask=inside)


@triton.jit
def write_rows_kernel(
    k,
    v,
    kv_cache,
    cos,
    sin,
    slots,
    num_rows,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Write a tile of rows of one head; grid (tiles, NUM_KV_HEADS). Rows with a negative slot are padding."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    real = slot >= 0
    d = tl.arange(0, BLOCK_D)
    dtype = kv_cache.dtype.element_ty
    head = tl.zeros([BLOCK_ROWS], tl.int32) + kv_head
    place = kv_cache + (slot * 2 * NUM_KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
    mask = real[:, None] & (d < DIM)[None, :]
    key = _rotated_rows(k, k_stride, rows, real, head, cos, sin, DIM, BLOCK_D, ROPE)
    tl.store(place, key.to(dtype), mask=mask)
    value = _rotated_rows(v, v_stride, rows, real, head, cos, sin, DIM, BLOCK_D, False)
    tl.store(place + NUM_KV_HEADS * DIM, value.to(dtype), mask=mask)
