"""Ragged batches over paged caches, with everything poisoned that must not be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PagedBatch", "chain_ancestors", "make_paged_batch", "tree_ancestors"]

POISON = float("nan")
FAR_PAGE = 2**30  # would be far outside the cache


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Arguments of `paged_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    kv_cache: Tensor
    cos: Tensor | None
    sin: Tensor | None
    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    slots: Tensor
    positions: Tensor
    ancestors: Tensor | None
    page_size: int

    @property
    def num_rows(self) -> int:
        return int(self.query_start[-1])

    def arguments(self, *, window: int = 0) -> tuple[Tensor | int | float | None, ...]:
        """Return the op's arguments with a cache of their own."""
        return (
            *(self.q, self.k, self.v, self.kv_cache.clone(), self.cos, self.sin, self.page_table),
            *(self.query_start, self.context_len, self.slots, self.positions, self.ancestors),
            *(self.page_size, self.q.shape[-1] ** -0.5, window),
        )


def make_paged_batch(
    rows: Sequence[int],
    context: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    rope: bool = True,
    ancestors: Tensor | None = None,
    padding: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """Return a batch whose sequences have `rows` new rows over `context` cached ones.

    Unused slots hold NaN, unused page entries a page that does not exist, padding rows NaN and a slot that does not
    exist.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    num_rows, num_sequences = sum(rows), len(rows)
    pages = [-(-(c + n) // page_size) for c, n in zip(context, rows, strict=True)]
    num_pages = sum(pages) + 2
    shuffled = torch.randperm(num_pages, generator=random).tolist()
    page_table = torch.full((num_sequences, max([*pages, 1])), FAR_PAGE, dtype=torch.int32)
    kv_cache = torch.full((num_pages * page_size, 2, num_kv_heads, head_dim), POISON, dtype=dtype)
    slots = torch.full((num_rows + padding,), FAR_PAGE, dtype=torch.int32)
    positions = torch.zeros(num_rows + padding, dtype=torch.int32)
    at = 0
    for i, (num_new, cached) in enumerate(zip(rows, context, strict=True)):
        its = torch.tensor([shuffled.pop() for _ in range(pages[i])], dtype=torch.int64)
        needed = -(-cached // page_size)
        page_table[i, :needed] = its[:needed].int()
        position = torch.arange(cached + num_new)
        slot = its[position // page_size] * page_size + position % page_size if len(position) else position
        kv_cache[slot[:cached]] = normal(cached, 2, num_kv_heads, head_dim)
        slots[at : at + num_new] = slot[cached:].int()
        positions[at : at + num_new] = position[cached:].int()
        at += num_new
    angles = torch.rand(num_rows + padding, head_dim // 2, generator=random) * 6.0
    q, k, v = (normal(num_rows + padding, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads))
    for x in (q, k, v):
        x[num_rows:] = POISON
    query_start = torch.tensor([0, *torch.tensor(list(rows)).cumsum(0).tolist()], dtype=torch.int32)
    return PagedBatch(
        q=q,
        k=k,
        v=v,
        kv_cache=kv_cache,
        cos=angles.cos() if rope else None,
        sin=angles.sin() if rope else None,
        page_table=page_table,
        query_start=query_start,
        context_len=torch.tensor(list(context), dtype=torch.int32),
        slots=slots,
        positions=positions,
        ancestors=ancestors,
        page_size=page_size,
    )


def chain_ancestors(rows: Sequence[int], *, words: int) -> Tensor:
    """Return the masks of chains, [T, words] int32."""
    return tree_ancestors([list(range(-1, n - 1)) for n in rows], words=words)


def tree_ancestors(parents: Sequence[Sequence[int]], *, words: int) -> Tensor:
    """Return the masks [T, words] int32 of trees given by every row's parent, -1 for the first."""
    masks: list[list[int]] = []
    for tree in parents:
        seen: list[int] = []
        for row, parent in enumerate(tree):
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << row)
        for mask in seen:
            halves = [(mask >> (32 * word)) & 0xFFFFFFFF for word in range(words)]
            masks.append([half - 2**32 if half >= 2**31 else half for half in halves])
    return torch.tensor(masks, dtype=torch.int32)
