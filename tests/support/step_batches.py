"""Ragged passes over paged caches, as an engine would ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dspark.executors.interface import StepBatch

__all__ = ["ragged_step"]


def ragged_step(
    rng: np.random.Generator,
    rows: Sequence[int],
    context: Sequence[int],
    *,
    page_size: int,
    max_pages: int = 6,
) -> StepBatch:
    """Return a pass of `rows` new rows over `context` cached ones of each sequence, all logits wanted.

    Sequence i has the pages i * max_pages on, the last one first.
    """
    owner = np.repeat(np.arange(len(rows)), rows)
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    positions = (np.arange(len(owner)) - start[owner] + np.array(context)[owner]).astype(np.int32)
    table = np.arange(max_pages * len(rows), dtype=np.int32).reshape(len(rows), max_pages)[:, ::-1].copy()
    return StepBatch(
        tokens=rng.integers(0, 50, len(owner)).astype(np.int32),
        positions=positions,
        query_start=start,
        context_len=np.array(context, np.int32),
        page_table=table,
        slots=(table[owner, positions // page_size] * page_size + positions % page_size).astype(np.int32),
        logit_rows=np.arange(len(owner), dtype=np.int32),
    )
