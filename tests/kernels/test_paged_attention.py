"""The kernel and the plain version of paged attention are one function."""

from __future__ import annotations

import pytest
import torch
from dspark_plugins import ops
from dspark_plugins.ops.launchers.attention import launch_paged_attention
from support.paged_batches import PagedBatch, chain_ancestors, make_paged_batch, tree_ancestors
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def both(batch: PagedBatch, *, window: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and cache of the kernel, then of the plain version."""
    mine, plain = batch.arguments(window=window), batch.arguments(window=window)
    out = launch_paged_attention(*mine)  # before the answer exists
    expected = ops.paged_attention(*plain)
    return out[: batch.num_rows], mine[3], expected[: batch.num_rows], plain[3]


def check(batch: PagedBatch, *, window: int = 0) -> None:
    out, cache, expected, expected_cache = both(batch, window=window)
    tolerance = TOLERANCE[batch.v.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache, expected_cache, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("context", [0, 1, 7, 15, 16, 17, 111, 999])
def test_one_row_over_any_context(context: int, dtype: torch.dtype) -> None:
    check(make_paged_batch([1], [context], num_heads=2, num_kv_heads=1, dtype=dtype))


@pytest.mark.parametrize("num_rows", [7, 16, 17, 111])
def test_a_prompt_sees_itself_and_what_was_before(num_rows: int) -> None:
    check(make_paged_batch([num_rows], [0], num_heads=2, num_kv_heads=1))
    check(make_paged_batch([num_rows], [33], num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prompts_decoding_rows_and_drafted_blocks_share_a_pass(dtype: torch.dtype) -> None:
    check(make_paged_batch([1, 8, 0, 40, 1, 3], [31, 7, 5, 0, 0, 48], dtype=dtype))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 16), (8, 1, 32), (2, 2, 80)]
)
def test_any_grouping_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check(
        make_paged_batch([3, 1], [20, 5], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    )


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_any_page_size(page_size: int) -> None:
    check(make_paged_batch([2, 5], [14, 64], page_size=page_size))


def test_rotated_rows_are_taken_as_they_are() -> None:
    check(make_paged_batch([2, 5], [14, 64], rope=False))


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_a_window_hides_what_is_far(window: int) -> None:
    check(make_paged_batch([1, 20, 3], [37, 9, 0]), window=window)


def test_a_window_over_split_contexts() -> None:
    check(make_paged_batch([2], [1100], num_heads=2, num_kv_heads=1), window=100)


@pytest.mark.parametrize("context", [511, 512, 513, 1024])
def test_split_contexts_join_to_the_whole(context: int) -> None:
    check(make_paged_batch([3, 1], [context, 7], num_heads=2, num_kv_heads=1, dtype=torch.float16))


def test_branches_of_a_tree_do_not_see_each_other() -> None:
    trees = [[-1, 0, 0, 1, 1, 2, 3], [-1], [-1, 0, 1, 1]]
    rows = [len(tree) for tree in trees]
    check(make_paged_batch(rows, [20, 3, 0], ancestors=tree_ancestors(trees, words=1)))


def test_wide_trees_need_more_words() -> None:
    tree = [-1, *[0] * 40]
    check(make_paged_batch([41, 2], [5, 9], ancestors=tree_ancestors([tree, [-1, 0]], words=2)))


def test_a_chain_is_a_tree() -> None:
    rows, context = [5, 1, 9], [20, 3, 0]
    chain = launch_paged_attention(*make_paged_batch(rows, context).arguments())
    ancestors = chain_ancestors(rows, words=1)
    tree = launch_paged_attention(*make_paged_batch(rows, context, ancestors=ancestors).arguments())
    assert torch.equal(chain, tree)


def test_padding_is_neither_read_nor_written() -> None:
    rows, context = [3, 1], [17, 4]
    batch = make_paged_batch(rows, context, padding=6)
    out, cache, expected, expected_cache = both(batch)
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(cache, expected_cache, atol=2e-6, rtol=2e-6, equal_nan=True)


def test_no_rows_at_all() -> None:
    batch = make_paged_batch([0, 0], [5, 0])
    assert launch_paged_attention(*batch.arguments()).shape == (0, 4, 16)


def test_a_row_has_the_same_bits_alone_and_in_company_and_again() -> None:
    batch = make_paged_batch([2, 9, 1], [600, 3, 40], num_heads=2, num_kv_heads=1)
    first = launch_paged_attention(*batch.arguments())
    assert torch.equal(first, launch_paged_attention(*batch.arguments()))
    alone = PagedBatch(
        **{name: getattr(batch, name)[:2] for name in ("q", "k", "v", "cos", "sin", "slots", "positions")},
        kv_cache=batch.kv_cache,
        page_table=batch.page_table[:1],
        query_start=batch.query_start[:2],
        context_len=batch.context_len[:1],
        ancestors=None,
        page_size=batch.page_size,
    )
    assert torch.equal(first[:2], launch_paged_attention(*alone.arguments()))


def test_views_into_one_product_are_read_in_place() -> None:
    batch = make_paged_batch([3, 2], [9, 18])
    product = torch.cat([batch.q, batch.k, batch.v], dim=1)
    _, _, *rest = batch.arguments()
    views = product[:, :4], product[:, 4:6], product[:, 6:]
    out = launch_paged_attention(*views, batch.kv_cache.clone(), *rest[2:])
    assert torch.equal(out, launch_paged_attention(*batch.arguments()))


def test_the_op_is_registered_as_it_behaves() -> None:
    torch.library.opcheck(
        torch.ops.dspark.paged_attention.default,
        make_paged_batch([2, 1], [5, 0]).arguments(),
        test_utils=("test_schema", "test_faketensor"),
    )
