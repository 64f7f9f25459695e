"""The torch drafter against the formulas of algorithm.md, section 2, written out one position at a time in
float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import ConfigError
from dspark.executors.interface import DraftBatch
from dspark.executors.torch_drafter import TorchBlockDrafter
from support.dense_drafter import PAGE_SIZE, Bench
from support.tiny_drafters import Head, tiny_target_config, write_tiny_drafter

HEADS: tuple[Head, ...] = ("vanilla", "gated", "rnn")


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("windows", [(None, None), (None, 5), (7, 7)])
def test_block_pass_equals_the_dense_formulas(
    tmp_path: Path, qk_norm: bool, num_heads: int, num_kv_heads: int, windows: tuple[int | None, int | None]
) -> None:
    target = tiny_target_config(qk_norm=qk_norm, num_heads=num_heads, num_kv_heads=num_kv_heads)
    bench = Bench(tmp_path / "d", target, sliding_windows=windows, target_layer_ids=(-1, 2))
    lens = [0, 1, 5, 13, 8]
    batch, slots = bench.batch(lens)
    features = [bench.features(length) for length in lens]
    for rows, at in zip(features, slots, strict=True):
        bench.append(rows, at)
    output = bench.executor.draft(batch)
    assert output.base_logits.dtype == output.hidden.dtype == np.float32
    for row, length in enumerate(lens):
        hidden, logits = bench.dense.block(features[row], int(batch.anchors[row]), length)
        np.testing.assert_allclose(output.hidden[row], hidden, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(output.base_logits[row], logits, rtol=2e-4, atol=5e-5)


def test_context_in_pieces_equals_context_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config())
    batch, (slots,) = bench.batch([11])
    features = bench.features(11)
    bench.append(features, slots)
    whole = bench.executor.draft(batch)
    bench.executor._k_cache.fill_(float("nan"))
    for start, stop in ((0, 3), (3, 4), (4, 4), (4, 11)):
        bench.append(features[start:stop], slots, start)
    pieces = bench.executor.draft(batch)
    np.testing.assert_allclose(pieces.base_logits, whole.base_logits, rtol=1e-5, atol=1e-6)


def test_rows_of_rejected_drafts_are_overwritten(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config())
    batch, (slots,) = bench.batch([9])
    features = bench.features(9)
    bench.append(np.concatenate([features[:5], bench.features(4)]), slots)
    wrong = bench.executor.draft(batch).base_logits
    bench.append(features[5:], slots, 5)
    right = bench.executor.draft(batch).base_logits
    _, expected = bench.dense.block(features, int(batch.anchors[0]), 9)
    np.testing.assert_allclose(right[0], expected, rtol=2e-4, atol=5e-5)
    assert np.abs(wrong - right).max() > 1e-3


def test_a_block_leaves_nothing_behind(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config())
    batch, (slots,) = bench.batch([6])
    bench.append(bench.features(6), slots)
    before = bench.executor._k_cache.clone(), bench.executor._v_cache.clone()
    first = bench.executor.draft(batch).base_logits
    assert np.array_equal(first, bench.executor.draft(batch).base_logits)
    for kept, now in zip(before, (bench.executor._k_cache, bench.executor._v_cache), strict=True):
        assert kept.nan_to_num(7.0).equal(now.nan_to_num(7.0))


def test_batch_does_not_change_a_block(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config(qk_norm=True), sliding_windows=(4, None))
    lens = [3, 17, 0, 6]
    batch, slots = bench.batch(lens)
    for length, at in zip(lens, slots, strict=True):
        bench.append(bench.features(length), at)
    together = bench.executor.draft(batch).base_logits
    for row in range(len(lens)):
        one = slice(row, row + 1)
        alone = DraftBatch(
            anchors=batch.anchors[one],
            anchor_positions=batch.anchor_positions[one],
            context_len=batch.context_len[one],
            page_table=batch.page_table[one],
        )
        np.testing.assert_allclose(
            bench.executor.draft(alone).base_logits[0], together[row], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("small_w1", [False, True])
def test_heads_equal_the_formulas_over_a_whole_block(tmp_path: Path, head: Head, small_w1: bool) -> None:
    target = tiny_target_config()
    bench = Bench(tmp_path / "d", target, head=head, draft_vocab=20 if small_w1 else None, small_w1=small_w1)
    hidden = bench.rng.standard_normal((3, 32)).astype(np.float32)
    state = bench.executor.initial_state(3)
    assert (state is None) == (head != "rnn")
    dense_state = [np.zeros(6)] * 3
    for _ in range(3):
        previous = bench.rng.integers(0, target.vocab_size, 3).astype(np.int32)
        bias, state = bench.executor.head_step(previous=previous, hidden=hidden, state=state)
        assert bias is not None
        for row in range(3):
            expected, after = bench.dense.bias(int(previous[row]), hidden[row], dense_state[row])
            np.testing.assert_allclose(bias[row], expected, rtol=1e-4, atol=1e-5)
            if after is not None:
                dense_state[row] = after
                assert state is not None
                np.testing.assert_allclose(state[row], after, rtol=1e-4, atol=1e-5)


def test_rank_0_has_neither_bias_nor_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config(), head="none")
    hidden = np.zeros((2, 32), np.float32)
    previous = np.array([1, 2], np.int32)
    assert bench.executor.initial_state(2) is None
    assert bench.executor.head_step(previous=previous, hidden=hidden, state=None) == (None, None)


@pytest.mark.parametrize("with_markov", [False, True])
@pytest.mark.parametrize("head", [*HEADS, "none"])
def test_confidence_equals_the_formula(tmp_path: Path, head: Head, with_markov: bool) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config(), head=head, confidence_with_markov=with_markov)
    hidden = bench.rng.standard_normal((4, 32)).astype(np.float32)
    previous = np.array([0, 3, 49, 7], np.int32)
    logits = bench.executor.confidence_logits(previous=previous, hidden=hidden)
    assert logits is not None and logits.shape == (4,)
    expected = [bench.dense.confidence(int(p), h) for p, h in zip(previous, hidden, strict=True)]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_without_a_confidence_head_there_are_no_logits(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config(), confidence=False)
    previous, hidden = np.array([1], np.int32), np.zeros((1, 32), np.float32)
    assert bench.executor.confidence_logits(previous=previous, hidden=hidden) is None


def test_own_embedding_and_head_replace_the_targets(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config(), own_embedding=True, own_head=True, draft_vocab=15)
    lone = TorchBlockDrafter(
        bench.checkpoint, target_embedding=bench.embedding, target_head=None, dtype="float32"
    )
    batch, (slots,) = bench.batch([4])
    features = bench.features(4)
    bench.append(features, slots)
    lone.allocate_cache(num_pages=8, page_size=PAGE_SIZE)
    output = bench.executor.draft(batch)
    assert output.base_logits.shape == (1, 4, 15)
    _, expected = bench.dense.block(features, int(batch.anchors[0]), 4)
    np.testing.assert_allclose(output.base_logits[0], expected, rtol=2e-4, atol=5e-5)


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    target = tiny_target_config()
    outputs = []
    for dtype in ("float32", "bfloat16"):
        bench = Bench(tmp_path / dtype, target, dtype=dtype)
        batch, (slots,) = bench.batch([7])
        bench.append(bench.features(7), slots)
        outputs.append(bench.executor.draft(batch).base_logits)
    difference = np.abs(outputs[0] - outputs[1]).mean() / np.abs(outputs[0]).mean()
    assert 1e-5 < difference < 0.05


def test_page_bytes_are_those_of_the_cache(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "d", tiny_target_config())
    bench.executor.allocate_cache(num_pages=3, page_size=16)
    held = sum(cache.numel() * cache.itemsize for cache in (bench.executor._k_cache, bench.executor._v_cache))
    assert 3 * bench.executor.cache_page_bytes(16) == held


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    target = tiny_target_config()
    write_tiny_drafter(tmp_path / "d", target)
    checkpoint = load_drafter_checkpoint(tmp_path / "d", target=target)
    embedding = np.zeros((50, 32), np.float32)
    with pytest.raises(ConfigError, match="int3"):
        TorchBlockDrafter(checkpoint, target_embedding=embedding, target_head=embedding, dtype="int3")
