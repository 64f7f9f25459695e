"""Greedy decoding of a few sequences through a target executor, without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dspark.executors.interface import StepBatch, TargetExecutor

__all__ = ["PAGE", "Run", "greedy"]

PAGE = 16


@dataclass(frozen=True, slots=True)
class Run:
    """What was decoded, and how long a decoding pass took at least."""

    tokens: list[list[int]]
    step_s: float


def greedy(target: TargetExecutor, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> Run:
    """Decode `num_tokens` of every prompt together: one ragged pass of all prompts, then row by row."""
    longest = max(len(prompt) for prompt in prompts) + num_tokens
    num_pages = -(-longest // PAGE)
    target.allocate_cache(num_pages=num_pages * len(prompts), page_size=PAGE)
    table = np.arange(num_pages * len(prompts), dtype=np.int32).reshape(len(prompts), num_pages)
    context = np.zeros(len(prompts), np.int32)
    new = [list(prompt) for prompt in prompts]
    decoded: list[list[int]] = [[] for _ in prompts]
    best = float("inf")
    for step in range(num_tokens):
        rows = np.array([len(tokens) for tokens in new])
        owner = np.repeat(np.arange(len(prompts)), rows)
        start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        positions = (np.arange(len(owner)) - start[owner] + context[owner]).astype(np.int32)
        slots = table[owner, positions // PAGE] * PAGE + positions % PAGE
        batch = StepBatch(
            tokens=np.array([token for tokens in new for token in tokens], np.int32),
            positions=positions,
            query_start=start,
            context_len=context,
            page_table=table,
            slots=slots.astype(np.int32),
            logit_rows=start[1:] - 1,
        )
        begin = time.perf_counter()
        out = target.forward(batch)
        if step:
            best = min(best, time.perf_counter() - begin)
        context = context + rows.astype(np.int32)
        new = [[int(token)] for token in out.argmax]
        for tokens, token in zip(decoded, out.argmax, strict=True):
            tokens.append(int(token))
    return Run(decoded, best)
