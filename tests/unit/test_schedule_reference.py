"""The device op's reference and the scheduler's own code make the same choice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dspark.scheduling.allocation import best_num, rank_candidates, survival_of, throughput, verify_len_of
from dspark_plugins.reference.schedule import schedule


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("num_sequences", "block_size"), [(1, 1), (3, 5), (64, 7), (200, 16)])
def test_reference_and_scheduler_agree(num_sequences: int, block_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Powers of two: products are exact in any precision, and ties are many.
    confidence = rng.choice([0.0, 0.25, 0.5, 1.0], (num_sequences, block_size)).astype(np.float32)
    num_drafts = rng.integers(0, block_size + 1, num_sequences).astype(np.int32)
    seconds = 1.0 + np.cumsum(rng.choice([0.0, 0.01, 0.3], num_sequences * block_size + 1))
    budget = int(rng.integers(-1, num_sequences * block_size + 1))
    step = int(rng.integers(100))
    budgets = torch.tensor([-7, -7], dtype=torch.int32)
    budgets[step % 2] = budget

    out = schedule(
        torch.from_numpy(confidence), torch.from_numpy(num_drafts), budgets, step, torch.from_numpy(seconds)
    )

    candidates = rank_candidates(survival_of(confidence.astype(np.float64), num_drafts))
    expected = verify_len_of(candidates, max(budget, 0), num_sequences=num_sequences)
    assert out.verify_len.tolist() == expected.tolist()
    best = best_num(throughput(candidates, num_sequences=num_sequences, seconds=seconds))
    assert out.budgets[step % 2] == best
    assert out.budgets[(step + 1) % 2] == -7

    sources = [r * (1 + block_size) + j for r in range(num_sequences) for j in range(1 + int(expected[r]))]
    assert out.row_source[: len(sources)].tolist() == sources
    assert (out.row_source[len(sources) :] == -1).all()
    assert out.query_start.tolist() == [0, *np.cumsum(1 + expected).tolist()]


def test_a_confidence_that_is_not_a_number_ends_the_block() -> None:
    confidence = torch.tensor([[0.9, float("nan"), 0.9]])
    out = schedule(
        confidence,
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([3, 3], dtype=torch.int32),
        0,
        torch.ones(4),
    )
    assert out.verify_len.tolist() == [1]


def test_before_two_steps_nothing_is_verified() -> None:
    budgets = torch.tensor([-1, -1], dtype=torch.int32)
    confidence, drafts, seconds = (
        torch.full((2, 3), 0.9),
        torch.tensor([3, 3], dtype=torch.int32),
        torch.ones(7),
    )
    lengths = []
    for step in range(3):
        out = schedule(confidence, drafts, budgets, step, seconds)
        budgets = out.budgets
        lengths.append(out.verify_len.tolist())
    assert lengths == [[0, 0], [0, 0], [3, 3]]
