"""The native drafter: equal to the torch reference, and each block the same bits in any batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from dspark.drafters.checkpoint import DrafterCheckpoint, load_drafter_checkpoint
from dspark.drafters.interface import GreedyBlockExecutor
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.interface import DraftBatch
from dspark.executors.native_drafter import NativeBlockDrafter
from dspark.executors.native_target import NativeTarget
from dspark.executors.torch_drafter import TorchBlockDrafter
from dspark_plugins.native import native_available, native_unavailable_reason
from dspark_plugins.native.binding import ISAS
from support.tiny_drafters import write_tiny_drafter
from support.tiny_models import DictWeights, random_weights, tiny_config

pytestmark = pytest.mark.skipif(
    not native_available(), reason=f"no native code: {native_unavailable_reason()}"
)

Float32 = npt.NDArray[np.float32]
DTYPES = ("float32", "bfloat16", "int8")
TARGET = tiny_config(tie=True)
QWEN = tiny_config(architecture="qwen3", tie=True)
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {"head": "vanilla"},
    "gated": {"head": "gated"},
    "rnn_reduced": {"head": "rnn", "draft_vocab": 30, "small_w1": True},
    "no_head_window": {"head": "none", "sliding_windows": (5, None)},
    "own_ends": {"head": "vanilla", "own_embedding": True, "own_head": True, "draft_vocab": 20},
    "plain_confidence": {"head": "gated", "confidence_with_markov": False},
    "no_confidence": {"head": "rnn", "confidence": False},
}
GREEDY = np.array([4, 3, 1], np.int32)
PAGE_SIZE = 4


def checkpoint_of(folder: Path, kind: str) -> DrafterCheckpoint:
    target = QWEN if kind == "gated" else TARGET
    write_tiny_drafter(folder / kind, target, **KINDS[kind])
    return load_drafter_checkpoint(folder / kind, target=target)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def embedding() -> Float32:
    return np.random.default_rng(5).standard_normal((50, 32)).astype(np.float32)


def filled(
    executor: Any, layout: list[list[int]], lengths: list[int], *, chunk: int = 100, num_pages: int = 40
) -> DraftBatch:
    """Append random features of every sequence to its pages, `chunk` rows a call; return the blocks."""
    executor.allocate_cache(num_pages=num_pages, page_size=PAGE_SIZE)
    for index, (pages, length) in enumerate(zip(layout, lengths, strict=True)):
        features = np.random.default_rng(index).standard_normal((length, 64)).astype(np.float32)
        positions = np.arange(length, dtype=np.int32)
        slots = np.array([pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(length)], np.int32)
        for at in range(0, length, chunk):
            part = slice(at, at + chunk)
            executor.append_context(features=features[part], positions=positions[part], slots=slots[part])
    table = np.full((len(layout), max(map(len, layout))), -1, np.int32)
    for row, pages in zip(table, layout, strict=True):
        row[: len(pages)] = pages
    return DraftBatch(
        anchors=np.arange(3, 3 + len(layout), dtype=np.int32),
        anchor_positions=np.array(lengths, np.int32),
        context_len=np.array(lengths, np.int32),
        page_table=table,
    )


LAYOUT, LENGTHS = [[2, 3, 4, 5, 6], [11, 30, 12], [9]], [17, 11, 0]


def close(left: Any, right: Any) -> None:
    if left is None or right is None:
        assert left is right
        return
    assert left.shape == right.shape and left.dtype == right.dtype
    assert np.abs(left - right).max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_float32_equals_the_torch_reference(tmp_path: Path, kind: str) -> None:
    checkpoint, given = checkpoint_of(tmp_path, kind), embedding()
    options: dict[str, Any] = {"target_embedding": given, "target_head": given, "dtype": "float32"}
    native, torch = NativeBlockDrafter(checkpoint, **options), TorchBlockDrafter(checkpoint, **options)
    batch = filled(native, LAYOUT, LENGTHS)
    filled(torch, LAYOUT, LENGTHS)
    ours, theirs = native.draft(batch), torch.draft(batch)
    close(ours.base_logits, theirs.base_logits)
    close(ours.hidden, theirs.hidden)
    state = native.initial_state(3)
    close(state, torch.initial_state(3))
    for k in range(2):
        step: dict[str, Any] = {"previous": batch.anchors + k, "hidden": theirs.hidden[:, k]}
        close(native.confidence_logits(**step), torch.confidence_logits(**step))
        mine, after = native.head_step(**step, state=state)
        reference, reference_after = torch.head_step(**step, state=state)
        close(mine, reference)
        close(after, reference_after)
        state = reference_after
    greedy, wanted = (
        native.draft_greedy(batch, num_drafts=GREEDY),
        torch.draft_greedy(batch, num_drafts=GREEDY),
    )
    np.testing.assert_array_equal(greedy.num_tokens, wanted.num_tokens)
    for row, count in enumerate(wanted.num_tokens):
        np.testing.assert_array_equal(greedy.tokens[row, :count], wanted.tokens[row, :count])
    close(greedy.confidence_logits, wanted.confidence_logits)


def test_auto_takes_int8_beside_any_native_target(tmp_path: Path) -> None:
    checkpoint_of(tmp_path, "rnn_reduced")
    folder = str(tmp_path / "rnn_reduced")
    layers = peek_drafter(folder, TARGET).feature_layer_ids
    for dtype in DTYPES:
        target = NativeTarget(
            TARGET,
            DictWeights(random_weights(TARGET)),
            dtype=dtype,
            feature_layer_ids=layers,
            num_threads=1,
        )
        given: dict[str, Any] = {"target": TARGET, "target_executor": target, "executor": "native"}
        narrow = load_drafter(folder, **given, dtype="auto").executor  # type: ignore[attr-defined]
        wide = load_drafter(folder, **given, dtype="float32").executor  # type: ignore[attr-defined]
        assert (narrow.dtype, wide.dtype) == ("int8", "float32")
        assert narrow.arena.num_bytes < wide.arena.num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_greedy_block_draws_what_single_steps_draw(tmp_path: Path, kind: str, dtype: str) -> None:
    checkpoint, given = checkpoint_of(tmp_path, kind), embedding()
    executor = NativeBlockDrafter(checkpoint, target_embedding=given, target_head=given, dtype=dtype)
    assert isinstance(executor, GreedyBlockExecutor)
    batch = filled(executor, LAYOUT, LENGTHS)
    block = executor.draft_greedy(batch, num_drafts=np.array([4, 4, 4], np.int32))
    output, state, previous = executor.draft(batch), executor.initial_state(3), batch.anchors
    for k in range(4):
        hidden = output.hidden[:, k]
        rated = executor.confidence_logits(previous=previous, hidden=hidden)
        if rated is not None and block.confidence_logits is not None:
            np.testing.assert_array_equal(block.confidence_logits[:, k], rated)
        bias, state = executor.head_step(previous=previous, hidden=hidden, state=state)
        best = (output.base_logits[:, k] + (0 if bias is None else bias)).argmax(-1)
        mapping = checkpoint.draft_to_target
        previous = (best if mapping is None else mapping[best]).astype(np.int32)
        np.testing.assert_array_equal(block.tokens[:, k], previous)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gated", "rnn_reduced", "no_head_window"])
def test_neighbours_pages_chunks_and_threads_change_no_bit(
    tmp_path: Path, kind: str, dtype: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_NATIVE_ISA", isa)
    checkpoint, given = checkpoint_of(tmp_path, kind), embedding()
    one, two = (
        NativeBlockDrafter(
            checkpoint, target_embedding=given, target_head=given, dtype=dtype, num_threads=threads
        )
        for threads in (1, 2)
    )
    together = one.draft(filled(one, LAYOUT, LENGTHS))
    moved = two.draft(filled(two, [[31, 7, 22, 8, 1], [5, 2, 38], [0]], LENGTHS, chunk=3))
    np.testing.assert_array_equal(moved.base_logits, together.base_logits)
    batch = filled(two, LAYOUT, LENGTHS, chunk=1)
    for row in range(3):
        alone = DraftBatch(
            **{f.name: getattr(batch, f.name)[row : row + 1] for f in dataclasses.fields(batch)}
        )
        output = two.draft(alone)
        np.testing.assert_array_equal(output.base_logits[0], together.base_logits[row])
        np.testing.assert_array_equal(output.hidden[0], together.hidden[row])
        block = two.draft_greedy(alone, num_drafts=np.array([4], np.int32))
        wanted = one.draft_greedy(filled(one, LAYOUT, LENGTHS), num_drafts=np.array([4, 4, 4], np.int32))
        np.testing.assert_array_equal(block.tokens[0], wanted.tokens[row])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["vanilla", "no_head_window"])
def test_long_contexts_equal_the_reference_however_many_rows_attend_together(
    tmp_path: Path, kind: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_NATIVE_ISA", isa)
    checkpoint, given = checkpoint_of(tmp_path, kind), embedding()
    options: dict[str, Any] = {"target_embedding": given, "target_head": given, "dtype": "float32"}
    lengths = [254, 256, 300]  # blocks across the end of a chunk of 256 keys and behind it
    layout = [[80 * i + page for page in range(80)] for i in range(3)]
    one, four = (NativeBlockDrafter(checkpoint, num_threads=threads, **options) for threads in (1, 4))
    torch = TorchBlockDrafter(checkpoint, **options)
    output = one.draft(filled(one, layout, lengths, num_pages=240))
    close(output.hidden, torch.draft(filled(torch, layout, lengths, num_pages=240)).hidden)
    # Threads decide how many rows of a block go together.
    again = four.draft(filled(four, layout, lengths, num_pages=240))
    np.testing.assert_array_equal(again.hidden, output.hidden)


@pytest.mark.parametrize("kind", ["vanilla", "rnn_reduced"])
def test_a_native_target_lends_its_panels(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    checkpoint_of(tmp_path, kind)
    layers = peek_drafter(str(folder), TARGET).feature_layer_ids
    weights = DictWeights(random_weights(TARGET))
    target = NativeTarget(TARGET, weights, dtype="bfloat16", feature_layer_ids=layers, num_threads=1)
    drafter = load_drafter(
        str(folder), target=TARGET, target_executor=target, executor="native", dtype="bfloat16"
    )
    given, _ = target.embedding_and_head()
    checkpoint = load_drafter_checkpoint(folder, target=TARGET)
    apart = NativeBlockDrafter(
        checkpoint, target_embedding=given, target_head=given, dtype="bfloat16", num_threads=1
    )
    lent = drafter.executor  # type: ignore[attr-defined]
    assert lent.pool is target.pool
    assert lent.arena.num_bytes < apart.arena.num_bytes
    left = lent.draft(filled(lent, LAYOUT, LENGTHS))
    right = apart.draft(filled(apart, LAYOUT, LENGTHS))
    np.testing.assert_array_equal(left.base_logits, right.base_logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_context_ends_its_own_block_alone(tmp_path: Path, dtype: str) -> None:
    checkpoint, given = checkpoint_of(tmp_path, "vanilla"), embedding()
    executor = NativeBlockDrafter(checkpoint, target_embedding=given, target_head=given, dtype=dtype)
    batch = filled(executor, LAYOUT, LENGTHS)
    clean = executor.draft_greedy(batch, num_drafts=GREEDY)
    executor.append_context(
        features=np.full((1, 64), np.nan, np.float32),
        positions=np.array([3], np.int32),
        slots=np.array([11 * PAGE_SIZE + 3], np.int32),
    )
    sick = executor.draft_greedy(batch, num_drafts=GREEDY)
    assert sick.num_tokens.tolist() == [4, 0, 1]
    np.testing.assert_array_equal(sick.tokens[[0, 2]], clean.tokens[[0, 2]])


def test_what_does_not_fit_is_refused_naming_both_values(tmp_path: Path) -> None:
    checkpoint, given = checkpoint_of(tmp_path, "rnn_reduced"), embedding()
    executor = NativeBlockDrafter(
        checkpoint, target_embedding=given, target_head=given, dtype="float32", max_sequences=3
    )
    with pytest.raises(EngineError, match="allocate_cache comes before"):
        executor.append_context(
            features=np.zeros((1, 64), np.float32),
            positions=np.zeros(1, np.int32),
            slots=np.zeros(1, np.int32),
        )
    batch = filled(executor, LAYOUT, LENGTHS)
    four = np.zeros(4, np.int32)

    def refused(message: str, **fields: Any) -> None:
        with pytest.raises(EngineError, match=message):
            executor.draft(dataclasses.replace(batch, **fields))

    refused("anchors: got 4 blocks, allowed is 1 to 3", anchors=four)
    refused("anchors: got 3 to 50, allowed is 0 to 49", anchors=np.array([3, 4, 50], np.int32))
    refused("anchors: got int64", anchors=np.zeros(3, np.int64))
    refused(
        "context_len: got 21, allowed is at most 5 pages of 4", context_len=np.array([21, 1, 1], np.int32)
    )
    refused(
        "page_table: got 2 to 40, allowed is 0 to 39", page_table=np.array([[2, 3, 4, 5, 40]] * 3, np.int32)
    )
    refused("anchor_positions: got -1", anchor_positions=np.array([-1, 1, 1], np.int32))
    with pytest.raises(EngineError, match="num_drafts: got 1 to 5, allowed is 1 to 4"):
        executor.draft_greedy(batch, num_drafts=np.array([1, 5, 2], np.int32))
    rows: dict[str, Any] = {"positions": np.zeros(1, np.int32), "slots": np.zeros(1, np.int32)}
    with pytest.raises(EngineError, match=r"features: got float32 \[1, 63\], allowed is float32 \[N, 64\]"):
        executor.append_context(features=np.zeros((1, 63), np.float32), **rows)
    with pytest.raises(EngineError, match="slots: got 160 to 160, allowed is 0 to 159"):
        executor.append_context(
            features=np.zeros((1, 64), np.float32), **(rows | {"slots": np.array([160], np.int32)})
        )
    with pytest.raises(EngineError, match="slots: got 2 with 1 different, allowed is each once"):
        executor.append_context(
            features=np.zeros((2, 64), np.float32), positions=ints(0, 1), slots=ints(7, 7)
        )
    with pytest.raises(CapacityError, match="beside 12 of running blocks: allowed are 1 to 2\\^31 - 1"):
        executor.allocate_cache(num_pages=2**29 - 1, page_size=4)
    hidden = np.zeros((1, 32), np.float32)
    with pytest.raises(EngineError, match=r"state: got None, allowed is float32 \[1, 6\]"):
        executor.head_step(previous=np.zeros(1, np.int32), hidden=hidden, state=None)
    with pytest.raises(EngineError, match="previous: got 50 to 50, allowed is 0 to 49"):
        executor.confidence_logits(previous=np.array([50], np.int32), hidden=hidden)
    with pytest.raises(EngineError, match=r"hidden: got float32 \[1, 31\]"):
        executor.confidence_logits(previous=np.zeros(1, np.int32), hidden=hidden[:, 1:])


def test_no_blocks_at_all_are_refused_by_every_call(tmp_path: Path) -> None:
    executor = NativeBlockDrafter(
        checkpoint_of(tmp_path, "vanilla"),
        target_embedding=embedding(),
        target_head=embedding(),
        dtype="float32",
        num_threads=1,
    )
    executor.allocate_cache(num_pages=2, page_size=PAGE_SIZE)
    none = DraftBatch(
        anchors=ints(), anchor_positions=ints(), context_len=ints(), page_table=np.zeros((0, 1), np.int32)
    )
    for call in (
        lambda: executor.draft(none),
        lambda: executor.draft_greedy(none, num_drafts=ints()),
        lambda: executor.draft_tree(none, num_nodes=ints(), width=2, branch=2),
    ):
        with pytest.raises(EngineError, match="anchors: got 0 blocks, allowed is 1 to 512"):
            call()


def test_no_embedding_anywhere_and_an_unknown_dtype_are_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, "vanilla")
    with pytest.raises(
        CheckpointError, match=r"has no embed_tokens.weight, so the target's is needed; got none"
    ):
        NativeBlockDrafter(checkpoint, dtype="float32")
    with pytest.raises(CheckpointError, match=r"has no lm_head.weight, so the target's is needed; got none"):
        NativeBlockDrafter(checkpoint, target_embedding=embedding(), dtype="float32")
    with pytest.raises(ConfigError, match="dtype is 'float64'"):
        NativeBlockDrafter(checkpoint, target_embedding=embedding(), target_head=embedding(), dtype="float64")
