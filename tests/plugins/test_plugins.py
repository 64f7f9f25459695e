"""A plugin that was built, stored in fields and loaded again computes what its operation computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dspark_plugins import ops
from dspark_plugins.tensorrt.module import INSTALL, tensorrt_name
from support.paged_batches import FAR_PAGE, make_paged_batch, tree_ancestors
from torch import Tensor

if tensorrt_name() is None:
    pytest.skip(f"TensorRT is not installed: {INSTALL}", allow_module_level=True)

from support.plugin_launcher import run_plugin

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
TREE = [[-1, 0, 0, 1], [-1], [-1, 0, 1]]


def wide(page_table: Tensor, num_pages: int) -> Tensor:
    """Return a table with more pages than any context has."""
    table = torch.full((len(page_table), num_pages), FAR_PAGE, dtype=torch.int32)
    table[:, : page_table.shape[1]] = page_table
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("shape", "pages"), [("chain", 4), ("tree", 4), ("chain", 33), ("tree", 33)])
def test_paged_attention(shape: str, pages: int, dtype: torch.dtype) -> None:
    masks = tree_ancestors([*TREE, [-1] * 2], words=1) if shape == "tree" else None
    batch = make_paged_batch([4, 1, 3], [5, 33, 0], dtype=dtype, padding=2, ancestors=masks)
    q, k, v, cache, cos, sin, table, *rest = batch.arguments()
    starts, context, slots, positions, ancestors, page_size, scale, window = rest
    words = torch.zeros(len(batch.q), 0, dtype=torch.int32) if ancestors is None else ancestors
    given = [q, k, v, cache, cos, sin, wide(table, pages), starts, context, slots, positions, words]
    rows = {0: [0], 1: [0], 2: [0], 3: [0], 4: [0], 5: [0], 6: [0, 1], 7: [0], 8: [0], 9: [0], 10: [0]}
    (out, written), launcher = run_plugin(
        "DSparkPagedAttention",
        {"page_size": page_size, "scale": scale, "window": window},
        given,
        unknown=rows | {11: [0, 1]},
    )
    assert launcher.launched == ["attention_kernel", "merge_splits_kernel"][: 1 + (pages > 32)]
    plain = batch.arguments()
    expected = ops.paged_attention(*plain)[: batch.num_rows]
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out[: batch.num_rows], expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(written, plain[3], atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("window", "pages"), [(0, 4), (6, 33)])
def test_block_attention(window: int, pages: int) -> None:
    new = make_paged_batch([3, 0, 1], [5, 33, 0], padding=2)
    new.slots[new.num_rows :] = -1
    context = torch.tensor([8, 33, 1], dtype=torch.int32)
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, 5, n, 16, generator=random) for n in (4, 2, 2))
    angles = torch.rand(3, 5, 8, generator=random)
    assert new.cos is not None and new.sin is not None
    table = wide(new.page_table, pages)
    for i in (0, 2):
        start = int(new.query_start[i])
        table[i, 0] = int(new.slots[start]) // new.page_size
    given = [
        *(q, k, v, new.kv_cache.clone(), angles.cos(), angles.sin(), new.k, new.v, new.cos, new.sin),
        *(new.slots, table, context, context),
    ]
    (out, written), launcher = run_plugin(
        "DSparkBlockAttention",
        {"page_size": 16, "scale": 0.25, "window": window},
        given,
        unknown={i: [0] for i in range(14)} | {11: [0, 1]},
    )
    kernels = ["write_rows_kernel", "attention_kernel", "merge_splits_kernel"]
    assert launcher.launched == kernels[: 2 + (pages > 32)]
    plain = [*given]
    plain[3] = new.kv_cache.clone()
    expected = ops.block_attention(*plain, 16, 0.25, window)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(written, plain[3], atol=2e-6, rtol=2e-6, equal_nan=True)


HEADS = {"none": (0, 0, 0), "vanilla": (1, 0, 0), "gated": (2, 8, 32), "rnn": (3, 24, 40)}


@pytest.mark.parametrize("confidence", [0, 1, 2])
@pytest.mark.parametrize("head", HEADS)
def test_block_sample(head: str, confidence: int) -> None:
    if head == "none" and confidence == 2:
        confidence = 1
    random = torch.Generator().manual_seed(4)
    kind, mix_rows, mix_columns = HEADS[head]
    mapped = head == "gated"
    num_blocks, block, vocab, target_vocab, width, rank = 3, 3, 300, 600 if mapped else 300, 24, 8

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    optional: dict[str, Tensor | None] = {
        "markov_in": normal(target_vocab, rank) if kind else None,
        "markov_out": normal(vocab, rank) if kind else None,
        "mix_weight": normal(mix_rows, mix_columns) if kind > 1 else None,
        "mix_bias": normal(mix_rows) if kind > 1 else None,
        "confidence_weight": normal(width + (rank if confidence == 2 else 0)) if confidence else None,
        "confidence_bias": normal(1) if confidence else None,
        "greedy_confidence": normal(block, 3) if confidence else None,
        "draft_to_target": torch.arange(0, 600, 2, dtype=torch.int32) if mapped else None,
        "previous_rows": torch.arange(target_vocab, dtype=torch.int32).flip(0) if mapped else None,
    }
    always = [
        *(normal(num_blocks, block, vocab) * 2, normal(num_blocks, block, width), ints(1, 2, 290)),
        *(ints(3, 2, 3), ints(9, 9, 9), torch.tensor([5, -3, 2**40]), torch.tensor([0.0, 1.0, 0.7])),
        *(ints(0, 30, 0), torch.tensor([1.0, 0.9, 1.0]), torch.tensor([0.0, 0.0, 0.02]), ints(0, 1, 0)),
    ]
    (tokens, num_tokens, probs, rated), launcher = run_plugin(
        "DSparkBlockSample",
        {"head": kind, "confidence": confidence, "mapped": int(mapped), "previous": int(mapped)},
        [*always, *(x for x in optional.values() if x is not None)],
        unknown={i: [0] for i in range(11)},
    )
    expected = ops.block_sample(*always, *optional.values())
    assert launcher.launched == ["block_sample_kernel"]
    assert torch.equal(tokens, expected[0]) and torch.equal(num_tokens, expected[1])
    torch.testing.assert_close(rated, expected[3], atol=2e-4, rtol=2e-4)  # of 1 - q, by a difference
    for i in (1, 2):  # greedy rows have none
        kept = int(num_tokens[i])
        torch.testing.assert_close(probs[i, :kept], expected[2][i, :kept], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("drafted", ["one-hot", "full", "reduced"])
def test_verify(tree: bool, drafted: str) -> None:
    random = torch.Generator().manual_seed(2)
    trees: Sequence[Sequence[int]] = TREE if tree else [[-1, 0, 1, 2], [-1], [-1, 0, 1]]
    rows, vocab = sum(map(len, trees)), 130
    draft_vocab = 65 if drafted == "reduced" else vocab
    logits = torch.randn(rows + 2, vocab, generator=random) * 2
    tokens = torch.randint(0, draft_vocab, (rows + 2,), generator=random).int()
    tokens[1] = int(logits[0].argmax())
    starts = torch.tensor([0, *torch.tensor([len(t) for t in trees]).cumsum(0)], dtype=torch.int32)
    parents = torch.tensor([p for t in trees for p in t] + [0, 0], dtype=torch.int32)
    probs = torch.softmax(torch.randn(rows, draft_vocab, generator=random), -1)
    prob_rows = torch.cat([torch.arange(rows), torch.tensor([-1, -1])]).int()
    inverse = torch.full((vocab,), -1, dtype=torch.int32)
    inverse[:65] = torch.arange(65, dtype=torch.int32)
    has_probs, mapped = drafted != "one-hot", drafted == "reduced"
    optional = [
        parents if tree else None,
        *((probs, prob_rows) if has_probs else (None, None)),
        inverse if mapped else None,
    ]
    sampling = [
        torch.tensor([50, 51, 52], dtype=torch.int32),
        torch.tensor([-1, 7, 2**40]),
        torch.tensor([0.0, 1.0, 0.7]),
        torch.tensor([0, 4, 0], dtype=torch.int32),
        torch.tensor([1.0, 0.9, 1.0]),
        torch.tensor([0.0, 0.0, 0.02]),
        torch.tensor([0, 0, int(tree)], dtype=torch.int32),
    ]
    made, launcher = run_plugin(
        "DSparkVerify",
        {"max_depth": 4, "tree": int(tree), "probs": int(has_probs), "mapped": int(mapped)},
        [logits, tokens, starts, *(x for x in optional if x is not None), *sampling],
        unknown={0: [0], 1: [0], 2: [0]},
    )
    weighed = ["chain_weights_kernel"] if has_probs and not tree else []
    assert launcher.launched == ["row_limits_kernel", *weighed, "walk_kernel"]
    for mine, theirs in zip(made, ops.verify(logits, tokens, starts, *optional, *sampling, 4), strict=True):
        assert torch.equal(mine, theirs)


def test_schedule() -> None:
    random = torch.Generator().manual_seed(3)
    given = [
        torch.rand(5, 7, generator=random),
        torch.tensor([7, 0, 3, 7, 1], dtype=torch.int32),
        torch.tensor([9, 4], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        torch.linspace(1.0, 2.0, 36) ** 2,
    ]
    made, launcher = run_plugin("DSparkSchedule", {}, given, unknown={0: [0], 1: [0], 4: [0]})
    assert launcher.launched == ["schedule_kernel"]
    for mine, theirs in zip(made, ops.schedule(*given), strict=True):
        assert torch.equal(mine, theirs)


def test_memory_that_kernels_were_not_compiled_for_is_refused_by_name() -> None:
    shifted = torch.zeros(3, dtype=torch.int32)[1:]
    given = [torch.ones(2, 3), shifted, torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)]
    with pytest.raises(
        ValueError, match="DSparkSchedule: num_drafts must lie at a multiple of 16 bytes, got 0x"
    ):
        run_plugin("DSparkSchedule", {}, [*given, torch.ones(7)], unknown={0: [0], 1: [0], 4: [0]})


def test_a_pass_without_rows_writes_nothing() -> None:
    batch = make_paged_batch([0], [0])
    q, k, v, cache, cos, sin, table, *rest = batch.arguments()
    starts, context, slots, positions, _, page_size, scale, window = rest
    words: Any = torch.zeros(0, 0, dtype=torch.int32)
    table = torch.zeros(1, 0, dtype=torch.int32)
    before = cache.clone()
    (_, written), launcher = run_plugin(
        "DSparkPagedAttention",
        {"page_size": page_size, "scale": scale, "window": window},
        [q, k, v, cache, cos, sin, table, starts, context, slots, positions, words],
        unknown={i: [0] for i in range(12)},
    )
    # A tile per sequence is started, which finds nothing to do.
    assert launcher.launched == ["attention_kernel"]
    assert torch.equal(written.nan_to_num(1e9), before.nan_to_num(1e9))
