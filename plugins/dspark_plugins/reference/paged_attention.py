"""Attention of a ragged batch over a paged K/V cache, in plain PyTorch.

`plan_attention` turns one step's page tables into gather indices and masks, once per pass; `paged_attention`
then runs every layer with a handful of calls. Sequences with few rows are put together in groups of similar
length, so that a group is one call and padding stays within a quarter of the real work; a sequence with many
rows (a prefill chunk) is a group of its own. Nothing is padded to the longest sequence.

A NaN among a sequence's keys or values reaches all of its rows, masked or not, and never another sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["AttentionGroup", "AttentionPlan", "paged_attention", "plan_attention", "write_cache"]

Int32 = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]

_FEW_ROWS = 16  # sequences with at most this many rows may share a group
_SLACK = 1.25  # padded keys of a group per real key
_FREE_KEYS = 64  # padding of this many keys costs less than another call


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """N sequences of at most L keys and n rows each; padding repeats a sequence's first row and first key."""

    key_slots: torch.Tensor  # [N * L] int64 cache slots
    shape: tuple[int, int, int]  # N, n, L
    rows: torch.Tensor | None  # [N * n] int64 rows of the batch, None when they are all rows in order
    real: torch.Tensor | None  # [T_g] int64 which of the N * n rows are no padding, None when all are
    bias: torch.Tensor | None  # [N, 1, n, L] 0 where a row sees a key, -inf elsewhere; None when all is seen


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of one step are grouped; the same for every layer."""

    groups: tuple[AttentionGroup, ...]
    num_rows: int


def plan_attention(
    *,
    query_start: Int32,
    context_len: Int32,
    page_table: Int32,
    page_size: int,
    slots: Int32,
    positions: Int32,
    ancestors: Int32 | None = None,
    sliding_window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AttentionPlan:
    """Plan the attention of one step.

    Arguments:
        query_start: [R+1] rows of sequence i are query_start[i] : query_start[i+1].
        context_len: [R] tokens in the cache before this step.
        page_table: [R, max_pages] page ids.
        slots: [T] cache slot of each row of this step.
        positions: [T] absolute positions; only a sliding window looks at them.
        ancestors: [T, W] bit masks over the sequence's own rows, None for chains.
        sliding_window: a row sees positions above its own less this many; None = all.
        dtype: of the masks; the queries' own.
    """
    sequences = [
        _Sequence(int(start), int(stop - start), int(context), index)
        for index, (start, stop, context) in enumerate(
            zip(query_start[:-1], query_start[1:], context_len, strict=True)
        )
        if stop > start
    ]
    source = _Source(page_table, page_size, slots, positions, ancestors, sliding_window)
    num_rows = int(query_start[-1])
    return AttentionPlan(
        tuple(_group(members, source, num_rows, dtype, device) for members in _grouped(sequences)), num_rows
    )


def write_cache(kv_cache: torch.Tensor, keys_and_values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [T, 2, Hkv, D] into `kv_cache` [num_slots, 2, Hkv, D] at `slots` [T] int64, in place."""
    kv_cache.index_copy_(0, slots, keys_and_values)


def paged_attention(
    queries: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, *, scale: float
) -> torch.Tensor:
    """Return the attention output [T, H * D] of one layer.

    Arguments:
        queries: [T, H, D], RoPE applied.
        kv_cache: [num_slots, 2, Hkv, D] keys and values, the rows of this step already written; same dtype.
        plan: of this step, made for the queries' dtype and device.
        scale: multiplies the scores.
    """
    num_heads, dim = queries.shape[1:]
    if len(plan.groups) == 1 and plan.groups[0].rows is None:
        return _attend(queries, kv_cache, plan.groups[0], scale)
    output = queries.new_empty(plan.num_rows, num_heads * dim)
    for group in plan.groups:
        assert group.rows is not None
        attended, rows = _attend(queries.index_select(0, group.rows), kv_cache, group, scale), group.rows
        if group.real is not None:
            attended, rows = attended.index_select(0, group.real), rows.index_select(0, group.real)
        output.index_copy_(0, rows, attended)
    return output


def _attend(
    queries: torch.Tensor, kv_cache: torch.Tensor, group: AttentionGroup, scale: float
) -> torch.Tensor:
    """Return [N * n, H * D]. The query heads that share a key head are laid out as further rows of it."""
    n, rows, num_keys = group.shape
    num_heads, dim = queries.shape[1:]
    num_kv_heads = kv_cache.shape[2]
    shared = num_heads // num_kv_heads
    gathered = kv_cache.index_select(0, group.key_slots).view(n, num_keys, 2, num_kv_heads, dim)
    keys, values = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
    folded = queries.view(n, rows, num_kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
    bias = group.bias
    if bias is not None and shared > 1:
        bias = bias[:, :, None].expand(n, 1, shared, rows, num_keys).reshape(n, 1, shared * rows, num_keys)
    attended = torch.nn.functional.scaled_dot_product_attention(
        folded.reshape(n, num_kv_heads, shared * rows, dim), keys, values, attn_mask=bias, scale=scale
    )
    unfolded = attended.view(n, num_kv_heads, shared, rows, dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(n * rows, num_heads * dim)


@dataclass(frozen=True, slots=True)
class _Sequence:
    start: int  # first row
    num_rows: int
    context_len: int
    index: int  # row of the page table

    @property
    def num_keys(self) -> int:
        return self.context_len + self.num_rows


@dataclass(frozen=True, slots=True)
class _Source:
    page_table: Int32
    page_size: int
    slots: Int32
    positions: Int32
    ancestors: Int32 | None
    sliding_window: int | None

    def key_slots(self, sequence: _Sequence) -> Index:
        """Return the slots of the cached tokens, then of the sequence's own rows."""
        num_pages = -(-sequence.context_len // self.page_size)
        pages = self.page_table[sequence.index, :num_pages].astype(np.int64)
        cached = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()[: sequence.context_len]
        return np.concatenate([cached, self.slots[sequence.start : sequence.start + sequence.num_rows]])

    def visible(self, sequence: _Sequence) -> npt.NDArray[np.bool_]:
        """Return [rows, keys]: which keys each row sees."""
        rows = slice(sequence.start, sequence.start + sequence.num_rows)
        own = np.tri(sequence.num_rows, dtype=bool)
        if self.ancestors is not None:
            column = np.arange(sequence.num_rows)
            words = self.ancestors[rows].view(np.uint32)
            own = (words[:, column // 32] >> (column % 32).astype(np.uint32) & 1).astype(bool)
        seen: npt.NDArray[np.bool_] = np.concatenate(
            [np.ones((sequence.num_rows, sequence.context_len), bool), own], axis=1
        )
        if self.sliding_window is not None:
            at = self.positions[rows]
            keys = np.concatenate([np.arange(sequence.context_len), at])
            seen = np.logical_and(seen, keys[None, :] > at[:, None] - self.sliding_window)
        return seen


def _grouped(sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
    """Put sequences of few rows and similar length together; the order inside a group is the batch's."""
    groups = [[sequence] for sequence in sequences if sequence.num_rows > _FEW_ROWS]
    few = sorted((s for s in sequences if s.num_rows <= _FEW_ROWS), key=lambda s: s.num_keys)
    current: list[_Sequence] = []
    real = 0
    for sequence in few:
        padded = (len(current) + 1) * sequence.num_keys
        if current and padded > _SLACK * (real + sequence.num_keys) + _FREE_KEYS:
            groups.append(current)
            current, real = [], 0
        current.append(sequence)
        real += sequence.num_keys
    if current:
        groups.append(current)
    return [sorted(group, key=lambda s: s.start) for group in groups]


def _group(
    members: list[_Sequence], source: _Source, num_rows: int, dtype: torch.dtype, device: torch.device | str
) -> AttentionGroup:
    n, rows, keys = len(members), max(s.num_rows for s in members), max(s.num_keys for s in members)
    key_slots = np.empty((n, keys), np.int64)
    row_ids = np.empty((n, rows), np.int64)
    visible = np.zeros((n, rows, keys), bool)
    for i, sequence in enumerate(members):
        its_slots = source.key_slots(sequence)
        key_slots[i, : len(its_slots)] = its_slots
        key_slots[i, len(its_slots) :] = its_slots[0]  # masked; a slot of its own, so never a stranger's NaN
        row_ids[i, : sequence.num_rows] = np.arange(sequence.start, sequence.start + sequence.num_rows)
        row_ids[i, sequence.num_rows :] = sequence.start
        visible[i, : sequence.num_rows, : sequence.num_keys] = source.visible(sequence)
        visible[i, sequence.num_rows :, 0] = True  # padding rows see something, so that they stay finite
    real = np.concatenate([np.arange(s.num_rows) + i * rows for i, s in enumerate(members)])
    in_order = len(real) == num_rows == n * rows
    bias = None
    if not visible.all():
        mask = torch.from_numpy(visible).to(device)[:, None]
        bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))
    return AttentionGroup(
        key_slots=torch.from_numpy(key_slots.ravel()).to(device),
        shape=(n, rows, keys),
        rows=None if in_order else torch.from_numpy(row_ids.ravel()).to(device),
        real=None if len(real) == n * rows else torch.from_numpy(real).to(device),
        bias=bias,
    )
