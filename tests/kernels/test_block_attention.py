"""The kernel and the plain version of the drafter's block attention are one function."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from dspark_plugins import ops
from dspark_plugins.ops.launchers.attention import launch_block_attention
from support.paged_batches import FAR_PAGE, make_paged_batch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def arguments(
    context: Sequence[int],
    block_size: int,
    *,
    new: Sequence[int] = (),
    window: int = 0,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    rope: bool = True,
    new_padding: int = 0,
) -> list[Tensor | int | float | None]:
    """Return the op's arguments; the last `new[i]` context rows of a sequence are not in the cache yet."""
    new = new or [0] * len(context)
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    cached = [c - n for c, n in zip(context, new, strict=True)]
    # Its rows are the new context rows: their slots are what must be written.
    rows = make_paged_batch(
        new, cached, page_size=page_size, dtype=dtype, rope=rope, padding=new_padding, **shape
    )
    page_table = torch.full((len(context), max([-(-c // page_size) for c in context] + [1])), FAR_PAGE)
    page_table[:, : rows.page_table.shape[1]] = rows.page_table[:, : page_table.shape[1]]
    for i in range(len(context)):
        for row in range(int(rows.query_start[i]), int(rows.query_start[i + 1])):
            page_table[i, int(rows.positions[row]) // page_size] = int(rows.slots[row]) // page_size
    new_slots = rows.slots.clone()
    new_slots[rows.num_rows :] = -1
    random = torch.Generator().manual_seed(1)
    num_sequences = len(context)
    q, k, v = (
        torch.randn(num_sequences, block_size, n, head_dim, generator=random).to(dtype)
        for n in (num_heads, num_kv_heads, num_kv_heads)
    )
    angles = torch.rand(num_sequences, block_size, head_dim // 2, generator=random) * 6.0
    context_len = torch.tensor(list(context), dtype=torch.int32)
    return [
        *(q, k, v, rows.kv_cache, angles.cos() if rope else None, angles.sin() if rope else None),
        *(rows.k, rows.v, rows.cos, rows.sin, new_slots, page_table.int(), context_len, context_len),
        *(page_size, head_dim**-0.5, window),
    ]


def check(given: list[Tensor | int | float | None]) -> None:
    mine, plain = list(given), list(given)
    cache = given[3]
    assert isinstance(cache, Tensor)
    mine[3], plain[3] = cache.clone(), cache.clone()
    out = launch_block_attention(*mine)
    expected = ops.block_attention(*plain)
    tolerance = TOLERANCE[expected.dtype]
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(mine[3], plain[3], atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("context", [0, 1, 7, 16, 111, 999])
def test_a_block_sees_any_context_and_all_of_itself(context: int, dtype: torch.dtype) -> None:
    check(arguments([context], 7, num_heads=2, num_kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 7, 15, 16, 40])
def test_any_block_size(block_size: int) -> None:
    check(arguments([5, 33], block_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_new_rows_are_written_before_blocks_look_at_them(dtype: torch.dtype) -> None:
    check(arguments([20, 3, 48, 17], 5, new=[4, 3, 0, 1], dtype=dtype))


def test_padding_among_new_rows_is_not_written() -> None:
    check(arguments([20, 3], 5, new=[4, 3], new_padding=3))


def test_writing_alone() -> None:
    given = arguments([20, 3], 5, new=[20, 3])
    check([x[:0] if i in {0, 1, 2, 4, 5, 11, 12, 13} else x for i, x in enumerate(given)])


@pytest.mark.parametrize("window", [1, 4, 20])
def test_a_window_hides_far_context_and_none_of_the_block(window: int) -> None:
    check(arguments([33, 9, 0], 5, window=window))


def test_split_contexts_join_to_the_whole() -> None:
    check(arguments([1025, 30], 3, new=[2, 2], num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 32), (2, 2, 80)])
def test_any_grouping_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(
        arguments([20, 5], 4, new=[2, 5], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    )


@pytest.mark.parametrize("context", [9, 600])
def test_a_block_of_fifteen_at_wide_heads_takes_several_tiles(context: int) -> None:
    check(arguments([context, 3], 15, new=[2, 3], num_heads=4, num_kv_heads=1, head_dim=128))


def test_rotated_rows_are_taken_as_they_are() -> None:
    check(arguments([20, 5], 4, new=[2, 5], rope=False))


def test_the_same_bits_again() -> None:
    given = arguments([600, 5], 4, new=[2, 5])
    assert torch.equal(launch_block_attention(*given), launch_block_attention(*given))


def test_the_op_is_registered_as_it_behaves() -> None:
    torch.library.opcheck(
        torch.ops.dspark.block_attention.default,
        tuple(arguments([5, 3], 2, new=[1, 2])),
        test_utils=("test_schema", "test_faketensor"),
    )
