"""The device scheduler: the kernel is the plain version, bit for bit."""

from __future__ import annotations

import pytest
import torch
from dspark_plugins import ops
from dspark_plugins.ops.launchers.schedule import launch_schedule
from torch import Tensor


def arguments(
    num_sequences: int, block_size: int, *, budget: int, step: int = 4, seed: int = 0
) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    # Powers of two: products are exact, and ties are many.
    confidence = 0.5 ** torch.randint(0, 3, (num_sequences, block_size), generator=random)
    total = num_sequences * block_size
    budgets = torch.tensor([9, 9], dtype=torch.int32)
    budgets[step % 2] = budget
    return [
        confidence,
        torch.randint(0, block_size + 1, (num_sequences,), generator=random).int(),
        budgets,
        torch.tensor([step], dtype=torch.int32),
        1.0 + torch.rand(total + 1, generator=random).mul(0.02).cumsum(0),
    ]


def check(given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = launch_schedule(*given)
    for mine, plain in zip(out, ops.schedule(*given), strict=True):
        assert torch.equal(mine, plain)
    return out


@pytest.mark.parametrize(
    ("num_sequences", "block_size"),
    [(0, 3), (1, 1), (1, 7), (7, 5), (64, 7), (111, 3), (129, 8), (999, 1), (3, 15)],
)
def test_any_batch(num_sequences: int, block_size: int) -> None:
    check(arguments(num_sequences, block_size, budget=num_sequences * block_size // 3))


@pytest.mark.parametrize("budget", [-1, 0, 1, 6, 1000])
@pytest.mark.parametrize("step", [2, 3])
def test_any_budget(budget: int, step: int) -> None:
    check(arguments(5, 4, budget=budget, step=step, seed=budget + step))


def test_a_confidence_that_is_not_a_number_ends_its_block() -> None:
    given = arguments(3, 4, budget=100)
    given[0][1, 2] = float("nan")
    given[1].fill_(4)
    assert check(given)[0].tolist()[1] == 2


def test_padding_has_no_rows() -> None:
    given = arguments(5, 3, budget=100)
    given[1].copy_(torch.tensor([3, -1, 0, 2, -1]))
    verify_len, query_start, row_source, _ = check(given)
    assert verify_len.tolist() == [3, 0, 0, 2, 0]
    assert query_start.tolist() == [0, 4, 4, 5, 8, 8]
    assert row_source[:9].tolist() == [0, 1, 2, 3, 8, 12, 13, 14, -1]


def test_a_cliff_in_the_cost_is_looked_behind() -> None:
    given = arguments(4, 5, budget=7)
    given[0].fill_(0.9)
    given[1].fill_(5)
    given[4].fill_(2.0)
    given[4][0] = 1.9
    assert check(given)[3][0] == 20


def test_random_confidences() -> None:
    given = arguments(20, 6, budget=40, seed=3)
    given[0].copy_(torch.rand(20, 6))
    check(given)


def test_the_same_bits_again() -> None:
    given = arguments(37, 7, budget=90, seed=5)
    for first, second in zip(launch_schedule(*given), launch_schedule(*given), strict=True):
        assert torch.equal(first, second)


def test_the_op_is_registered_as_it_behaves() -> None:
    torch.library.opcheck(
        torch.ops.dspark.schedule.default,
        tuple(arguments(3, 2, budget=2)),
        test_utils=("test_schema", "test_faketensor"),
    )
