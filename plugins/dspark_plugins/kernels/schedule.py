"""Device code of the scheduler: which drafts are verified, in one program.

Survivals are ranked by counting who is ahead (position-major, so that equals keep the plain version's order); sorted
survivals give the budget of two steps later, ranks below the earlier budget the verify lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["schedule_kernel"]


@triton.jit
def schedule_kernel(
    confidence,
    num_drafts,
    budgets,
    step,
    seconds,
    verify_len,
    query_start,
    row_source,
    new_budgets,
    survival,
    ordered,
    rank_of,
    num_sequences,
    block_size,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Choose verify lengths; grid (1,). `survival`, `ordered` float32 and `rank_of` int32 are room for [R * G]."""
    total = num_sequences * block_size
    for start in range(0, num_sequences, BLOCK):
        r = start + tl.arange(0, BLOCK)
        real = r < num_sequences
        drafts = tl.load(num_drafts + r, mask=real, other=0)
        s = tl.full([BLOCK], 1.0, tl.float32)
        for k in range(block_size):
            c = tl.load(confidence + r * block_size + k, mask=real, other=0.0)
            s = s * tl.where((c > 0) & (k < drafts), c, 0.0)  # NaN is not above 0
            tl.store(survival + k * num_sequences + r, s, mask=real)
    tl.debug_barrier()

    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mine = tl.load(survival + i, mask=i < total, other=-1.0)
        rank = tl.zeros([BLOCK], tl.int32)
        for other in range(0, total, AHEAD):
            j = other + tl.arange(0, AHEAD)
            theirs = tl.load(survival + j, mask=j < total, other=-1.0)
            ahead = (theirs[None, :] > mine[:, None]) | (
                (theirs[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
            )
            rank += tl.sum(ahead.to(tl.int32), axis=1)
        tl.store(rank_of + i, rank, mask=i < total)
        tl.store(ordered + rank, mine, mask=i < total)
    tl.debug_barrier()

    slot = tl.load(step) % 2
    budget = tl.maximum(tl.load(budgets + slot), 0)
    filled = tl.full((), 0, tl.int32)
    for start in range(0, num_sequences, BLOCK):
        r = start + tl.arange(0, BLOCK)
        real = r < num_sequences
        length = tl.zeros([BLOCK], tl.int32)
        for k in range(block_size):
            rank = tl.load(rank_of + k * num_sequences + r, mask=real, other=2147483647)
            s = tl.load(survival + k * num_sequences + r, mask=real, other=0.0)
            length += ((rank < budget) & (s > 0)).to(tl.int32)
        tl.store(verify_len + r, length, mask=real)
        rows = tl.where(real & (tl.load(num_drafts + r, mask=real, other=-1) >= 0), 1 + length, 0)
        at = filled + tl.cumsum(rows, axis=0) - rows
        tl.store(query_start + r, at, mask=real)
        filled += tl.sum(rows, axis=0)
        for k in range(block_size + 1):
            tl.store(row_source + at + k, r * (1 + block_size) + k, mask=k < rows)
    tl.store(query_start + num_sequences, filled)
    for start in range(0, total + num_sequences, BLOCK):
        row = start + tl.arange(0, BLOCK)
        tl.store(row_source + row, -1, mask=(row >= filled) & (row < total + num_sequences))

    # Tokens per second with 0, 1, ... drafts; the first of the best.
    best = tl.full((), 0, tl.int32)
    reached = tl.load(seconds).to(tl.float64)
    best_theta = num_sequences / reached
    gained = tl.full((), 0.0, tl.float64) + num_sequences
    for start in range(0, total, BLOCK):
        j = start + tl.arange(0, BLOCK)
        s = tl.load(ordered + j, mask=j < total, other=0.0)
        tokens = gained + tl.cumsum(s.to(tl.float64), axis=0)
        took = tl.load(seconds + 1 + j, mask=j < total, other=1.0).to(tl.float64)
        theta = tl.where((j < total) & (s > 0), tokens / took, -1.0)
        here = tl.max(theta, axis=0)
        if here > best_theta:
            best_theta = here
            best = tl.min(tl.where(theta == here, j + 1, 2147483647), axis=0)
        gained += tl.sum(s.to(tl.float64), axis=0)
    tl.store(new_budgets + slot, best)
    tl.store(new_budgets + 1 - slot, tl.load(budgets + 1 - slot))
