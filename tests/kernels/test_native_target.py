"""The native target: right numbers, and the same bits whatever else is in the pass."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from dspark.config import ServeConfig
from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors.interface import StepBatch, TargetOutput
from dspark.executors.loading import make_target
from dspark.executors.native_target import NativeTarget
from dspark.models.config import RopeConfig, TargetConfig
from dspark.models.loading import TargetCheckpoint
from dspark_plugins.native import isa, native_available, native_unavailable_reason
from dspark_plugins.native.binding import ISAS, Arena, Matrix, NativeError, Pool
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_limit import address_space, alone
from support.native_batches import Row, Sequence, one_sequence, reference_logits, step_batch
from support.tiny_models import DictWeights, random_weights, tiny_config

pytestmark = pytest.mark.skipif(
    not native_available(), reason=f"no native code: {native_unavailable_reason()}"
)

DTYPES = ("float32", "bfloat16", "int8")
# Odd sizes on purpose: widths that fill no panel, heads below and above a vector, groups of 1 to 5 heads.
MODELS: dict[str, TargetConfig] = {
    "small": tiny_config(max_context_len=2048),
    "qwen": tiny_config(
        architecture="qwen3",
        vocab_size=77,
        hidden_size=72,
        intermediate_size=100,
        num_layers=2,
        num_heads=5,
        num_kv_heads=1,
        head_dim=24,
        tie=True,
    ),
    "wide": tiny_config(
        vocab_size=130,
        hidden_size=192,
        intermediate_size=320,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        tie=True,
        rope=RopeConfig(theta=5000.0),
    ),
}
NUM_SLOTS = 2048


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    before = os.environ.get("DSPARK_NATIVE_ISA")
    os.environ["DSPARK_NATIVE_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["DSPARK_NATIVE_ISA"]
        else:
            os.environ["DSPARK_NATIVE_ISA"] = before


@functools.cache
def machine_isas() -> tuple[str, ...]:
    """Return the variants this processor runs."""
    have = []
    for name in ISAS:
        with forced_isa(name):
            if isa() == name:
                have.append(name)
    return tuple(have)


@functools.cache
def weights_of(model: str) -> dict[str, npt.NDArray[np.float32]]:
    return random_weights(MODELS[model], seed=len(model))


@functools.cache
def target(model: str, dtype: str, variant: str, threads: int, layers: tuple[int, ...] = ()) -> NativeTarget:
    if variant not in machine_isas():
        pytest.skip(f"this processor has no {variant}")
    with forced_isa(variant):
        return NativeTarget(
            MODELS[model],
            DictWeights(weights_of(model)),
            dtype=dtype,
            feature_layer_ids=layers,
            num_threads=threads,
        )


def run_whole(which: NativeTarget, token_ids: list[int]) -> TargetOutput:
    which.allocate_cache(num_pages=NUM_SLOTS // 16, page_size=16)
    return which.forward(one_sequence(token_ids, page_size=16))


def tokens_of(model: str, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, MODELS[model].vocab_size, count).tolist()


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("model", MODELS)
def test_float32_logits_and_features_equal_a_float64_reference(model: str, variant: str) -> None:
    layers = (-1, 0, MODELS[model].decoder.num_layers - 1)
    which = target(model, "float32", variant, 1, layers)
    token_ids = tokens_of(model, 60)
    logits, residuals = reference_logits(MODELS[model], weights_of(model), token_ids)
    output = run_whole(which, token_ids)
    assert np.abs(output.logits - logits).max() < 1e-4
    assert output.features is not None
    wanted = np.concatenate([residuals[layer + 1] for layer in layers], axis=1)
    assert np.abs(output.features - wanted).max() < 1e-4
    assert output.finite.all()
    np.testing.assert_array_equal(output.argmax, output.logits.argmax(-1))


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", 0.03), ("int8", 0.1)])
def test_short_types_stay_near_the_reference(dtype: str, allowed: float, variant: str) -> None:
    token_ids = tokens_of("wide", 40)
    logits, _ = reference_logits(MODELS["wide"], weights_of("wide"), token_ids)
    output = run_whole(target("wide", dtype, variant, 1), token_ids)
    error = np.sqrt(((output.logits - logits) ** 2).mean() / (logits**2).mean())
    assert error < allowed


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_context_of_many_chunks_equals_the_reference_and_decodes_to_the_same_bits(
    dtype: str, variant: str
) -> None:
    which = target("small", dtype, variant, 2)
    token_ids = tokens_of("small", 700)
    whole = run_whole(which, token_ids)
    if dtype == "float32":
        logits, _ = reference_logits(MODELS["small"], weights_of("small"), token_ids)
        assert np.abs(whole.logits - logits).max() < 2e-4
    sequence = Sequence(pages=list(range(44)), cached=token_ids[:699])
    alone = which.forward(step_batch([(sequence, token_ids[699:])], page_size=16))
    np.testing.assert_array_equal(alone.logits[0], whole.logits[699])


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[int], list[int], int]:
    """Page size, lengths of the sequences, rows each takes in turn, and a seed for the page order."""
    page_size = draw(st.sampled_from([1, 3, 8, 16, 32]))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    chunks = draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))
    return page_size, lengths, chunks, draw(st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(plan=plans(), model=st.sampled_from(sorted(MODELS)))
def test_chunks_neighbours_pages_and_threads_change_no_bit(
    dtype: str, variant: str, plan: tuple[int, list[int], list[int], int], model: str
) -> None:
    page_size, lengths, chunks, seed = plan
    rng = np.random.default_rng(seed)
    texts = [tokens_of(model, length, seed + i) for i, length in enumerate(lengths)]
    wanted = [run_whole(target(model, dtype, variant, 1), text).logits for text in texts]
    which = target(model, dtype, variant, 2)
    num_pages = NUM_SLOTS // page_size
    which.allocate_cache(num_pages=num_pages, page_size=page_size)
    pages = rng.permutation(num_pages).tolist()
    sequences = [Sequence(pages=[pages.pop() for _ in range(-(-n // page_size))]) for n in lengths]
    turn = 0
    while any(len(s.cached) < len(t) for s, t in zip(sequences, texts, strict=True)):
        parts, owners = [], []
        for index, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            at, count = len(sequence.cached), chunks[(turn + index) % len(chunks)]
            if at < len(text) and (turn + index) % 3 != 2:  # one in three waits
                parts.append((sequence, text[at : at + count]))
                owners.append((index, at))
        turn += 1
        if not parts:
            continue
        output = which.forward(step_batch(parts, page_size=page_size))
        row = 0
        for (index, at), (sequence, chunk) in zip(owners, parts, strict=True):
            got = output.logits[row : row + len(chunk)]
            np.testing.assert_array_equal(got, wanted[index][at : at + len(chunk)])
            sequence.cached += chunk
            row += len(chunk)


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_equals_the_same_row_among_64_sequences(dtype: str, variant: str) -> None:
    which = target("wide", dtype, variant, 2)
    which.allocate_cache(num_pages=128, page_size=16)
    sequences = [Sequence(pages=[2 * i, 2 * i + 1]) for i in range(64)]
    texts = [tokens_of("wide", 6 + i % 17, i) for i in range(64)]
    which.forward(step_batch([(s, t[:-1]) for s, t in zip(sequences, texts, strict=True)], page_size=16))
    for sequence, text in zip(sequences, texts, strict=True):
        sequence.cached = text[:-1]
    last = [(s, t[-1:]) for s, t in zip(sequences, texts, strict=True)]
    together = which.forward(step_batch(last, page_size=16))
    for index in (0, 1, 31, 63):
        alone = which.forward(step_batch([last[index]], page_size=16))
        np.testing.assert_array_equal(alone.logits[0], together.logits[index])


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Length of the context and the parent of every row (-1 = the context)."""
    count = draw(st.integers(1, 40))
    return draw(st.integers(0, 30)), [draw(st.integers(-1, i - 1)) for i in range(count)]


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8, deadline=None)
@given(tree=trees(), seed=st.integers(0, 1000))
def test_a_path_of_a_tree_gives_the_bits_of_the_chain(
    dtype: str, variant: str, tree: tuple[int, list[int]], seed: int
) -> None:
    context_len, parents = tree
    context = tokens_of("small", context_len, seed)
    picked = tokens_of("small", len(parents), seed + 1)
    rows: list[Row] = []
    for token, parent in zip(picked, parents, strict=True):
        seen = () if parent < 0 else (*rows[parent].seen, parent)
        rows.append(Row(token=token, seen=seen))
    which = target("small", dtype, variant, 2)
    which.allocate_cache(num_pages=64, page_size=8)
    sequence = Sequence(pages=list(range(5, 20)))
    if context:
        which.forward(step_batch([(sequence, context)], page_size=8))
        sequence.cached = context
    beside = Sequence(pages=[40, 41])
    output = which.forward(step_batch([(sequence, []), (beside, [1, 2, 3])], page_size=8, trees={0: rows}))
    for index in {0, len(rows) // 2, len(rows) - 1}:
        path = [*(rows[i].token for i in rows[index].seen), rows[index].token]
        chain = run_whole(target("small", dtype, variant, 1), context + path)
        np.testing.assert_array_equal(output.logits[index], chain.logits[-1])
    chain = run_whole(target("small", dtype, variant, 1), [1, 2, 3])
    np.testing.assert_array_equal(output.logits[len(rows) :], chain.logits)


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_row_is_reported_and_poisons_no_one_else(dtype: str, variant: str) -> None:
    weights = dict(weights_of("small"))
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"].copy()
    weights["embed_tokens.weight"][7, 5] = np.nan
    healthy = target("small", dtype, variant, 2)
    with forced_isa(variant):
        sick = NativeTarget(MODELS["small"], DictWeights(weights), dtype=dtype, num_threads=2)
    clean, text = [3, 4, 5, 6], [1, 7, 2]
    sick.allocate_cache(num_pages=4, page_size=16)
    parts = [(Sequence(pages=[1]), clean), (Sequence(pages=[2]), text)]
    output = sick.forward(step_batch(parts, page_size=16))
    assert output.finite.tolist() == [True] * 5 + [False] * 2
    wanted = run_whole(healthy, clean).logits
    np.testing.assert_array_equal(output.logits[:4], wanted)
    # The pages of the failed sequence, reused, leave no trace of it.
    again = sick.forward(step_batch([(Sequence(pages=[2]), clean)], page_size=16))
    np.testing.assert_array_equal(again.logits, wanted)


def attending(group: int, head_dim: int) -> TargetConfig:
    """Return a decoder of one layer, all about attention: `group` query heads share each of two key heads."""
    return tiny_config(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=16,
        num_layers=1,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        max_context_len=1024,
    )


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_dim", "page_size"),
    [(1, 16, 16), (2, 24, 5), (3, 64, 16), (4, 40, 5), (5, 80, 16), (26, 8, 16)],
)
def test_rows_that_read_keys_together_have_the_bits_of_rows_that_come_alone(
    group: int, head_dim: int, page_size: int, dtype: str, variant: str
) -> None:
    config = attending(group, head_dim)
    if variant not in machine_isas():
        pytest.skip(f"this processor has no {variant}")
    with forced_isa(variant):
        which = NativeTarget(config, DictWeights(random_weights(config)), dtype=dtype, num_threads=1)
    lengths = (0, 9, 250, 255, 256, 257, 511, 512)
    text = np.random.default_rng(group).integers(0, 40, lengths[-1] + 9).tolist()
    num_pages = -(-len(text) // page_size)
    which.allocate_cache(num_pages=num_pages, page_size=page_size)
    pages = np.random.default_rng(1).permutation(num_pages).tolist()

    def after(context_len: int, num_rows: int, *, tree: bool = False) -> npt.NDArray[np.float32]:
        sequence = Sequence(pages=pages, cached=text[:context_len])
        chain = text[context_len : context_len + num_rows]
        path = [Row(token=token, seen=tuple(range(i))) for i, token in enumerate(chain)]
        return which.forward(
            step_batch([(sequence, chain)], page_size=page_size, trees={0: path} if tree else None)
        ).logits

    alone = np.concatenate([after(at, 1) for at in range(len(text))])
    for context_len in lengths:
        for num_rows in range(2, 10):
            wanted = alone[context_len : context_len + num_rows]
            np.testing.assert_array_equal(after(context_len, num_rows), wanted)
            np.testing.assert_array_equal(after(context_len, num_rows, tree=True), wanted)
    np.testing.assert_array_equal(after(0, len(text)), alone)


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context_len", [20, 250, 256])
def test_a_poisoned_draft_reaches_only_the_rows_that_see_it(
    context_len: int, dtype: str, variant: str
) -> None:
    weights = dict(weights_of("small"))
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"].copy()
    weights["embed_tokens.weight"][7, 5] = np.nan
    with forced_isa(variant):
        sick = NativeTarget(MODELS["small"], DictWeights(weights), dtype=dtype, num_threads=1)
    healthy = target("small", dtype, variant, 1)
    context = np.random.default_rng(2).integers(8, 40, context_len).tolist()
    bad = 4  # its row; of the tree's rows only the one behind it sees it
    seen = [(), (0,), (0, 1), (0,), (0, 3), (0, 3, 4), (0, 1, 2), (0, 3), (0, 1)]
    chains, sequence = [], Sequence(pages=list(range(20)), cached=context)
    for which, token in ((healthy, 9), (sick, 7)):
        which.allocate_cache(num_pages=20, page_size=16)
        which.forward(step_batch([(Sequence(pages=sequence.pages), context)], page_size=16))
        tokens = [token if row == bad else 10 + row for row in range(9)]
        rows = [Row(token=t, seen=s) for t, s in zip(tokens, seen, strict=True)]
        tree = which.forward(step_batch([(sequence, [])], page_size=16, trees={0: rows}))
        chains.append((which.forward(step_batch([(sequence, tokens)], page_size=16)), tree))
    (chain, tree), (sick_chain, sick_tree) = chains
    assert sick_chain.finite.tolist() == [row < bad for row in range(9)]
    np.testing.assert_array_equal(sick_chain.logits[:bad], chain.logits[:bad])
    apart = [row != bad and bad not in seen[row] for row in range(9)]
    assert sick_tree.finite.tolist() == apart
    np.testing.assert_array_equal(sick_tree.logits[apart], tree.logits[apart])
    for row in range(9):
        path = [9 if i == bad else 10 + i for i in (*seen[row], row)]
        along = healthy.forward(step_batch([(sequence, path)], page_size=16))
        np.testing.assert_array_equal(tree.logits[row], along.logits[-1])


@pytest.mark.parametrize("variant", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_keys_and_values_give_the_bits_of_those_that_stayed(dtype: str, variant: str) -> None:
    text = tokens_of("qwen", 40)
    wanted = run_whole(target("qwen", dtype, variant, 1), text).logits
    which = target("qwen", dtype, variant, 2)
    which.allocate_cache(num_pages=64, page_size=5)
    sequence = Sequence(pages=list(range(3, 11)))
    which.forward(step_batch([(sequence, text[:-1])], page_size=5))
    there = Sequence(pages=[2, 30, 41, 12, 50, 10, 60, 20], cached=text[:-1])  # some of them the first one's
    at = np.arange(39)
    source = (at + 15).astype(np.int32)
    # Through slots that nobody owns, so that no step of the move overwrites what a later one reads.
    beside = (at + 200 - 39).astype(np.int32)
    aim = (np.array(there.pages)[at // 5] * 5 + at % 5).astype(np.int32)
    which.move_cache(from_slots=source, to_slots=beside)
    which.move_cache(from_slots=np.concatenate([beside, aim]), to_slots=np.concatenate([aim, aim]))
    which.move_cache(from_slots=ints(), to_slots=ints())
    last = which.forward(step_batch([(there, text[-1:])], page_size=5))
    np.testing.assert_array_equal(last.logits[0], wanted[-1])


def test_logits_are_made_for_the_rows_asked_for_alone() -> None:
    which = target("small", "float32", machine_isas()[0], 1)
    whole = run_whole(which, [5, 6, 7, 8])
    batch = dataclasses.replace(
        one_sequence([5, 6, 7, 8], page_size=16), logit_rows=np.array([1, 3], np.int32)
    )
    some = which.forward(batch)
    np.testing.assert_array_equal(some.logits, whole.logits[[1, 3]])
    none = which.forward(dataclasses.replace(batch, logit_rows=np.empty(0, np.int32)))
    assert none.logits.shape == (0, 50) and none.argmax.shape == (0,)


def test_argmax_takes_the_lowest_id_among_equals() -> None:
    weights = dict(weights_of("small"))
    weights["lm_head.weight"] = np.repeat(weights["lm_head.weight"][:1], 50, 0)
    which = NativeTarget(MODELS["small"], DictWeights(weights), dtype="bfloat16", num_threads=1)
    assert run_whole(which, [1, 2, 3]).argmax.tolist() == [0, 0, 0]


def test_int8_of_avxvnni_has_the_bits_of_avx2() -> None:
    text = tokens_of("wide", 50)
    plain = run_whole(target("wide", "int8", "avx2", 1), text)
    np.testing.assert_array_equal(run_whole(target("wide", "int8", "avxvnni", 1), text).logits, plain.logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_and_head_are_the_weights_themselves_and_held_once_when_tied(dtype: str) -> None:
    which = target("wide", dtype, machine_isas()[0], 1)
    embedding, head = which.embedding_and_head()
    assert embedding is head
    given_rows = weights_of("wide")["embed_tokens.weight"]
    step = np.abs(given_rows).max(axis=1, keepdims=True) / 127
    allowed = {"float32": 0.0, "bfloat16": np.abs(given_rows) / 256, "int8": 0.51 * step}[dtype]
    assert (np.abs(embedding - given_rows) <= allowed).all()
    both = target("small", dtype, machine_isas()[0], 1).embedding_and_head()
    assert both[0] is not both[1]


def test_cache_page_bytes_counts_keys_and_values_of_every_layer() -> None:
    # 2 layers, 2 key heads, 64 dims, keys and values, 16 rows
    assert target("wide", "float32", machine_isas()[0], 1).cache_page_bytes(16) == 2 * 2 * 64 * 2 * 16 * 4
    assert target("wide", "bfloat16", machine_isas()[0], 1).cache_page_bytes(16) == 2 * 2 * 64 * 2 * 16 * 2


def broken(name: str, value: object) -> StepBatch:
    good = step_batch([(Sequence(pages=[0, 1], cached=[1] * 16), [5, 6, 7])], page_size=16)
    return dataclasses.replace(good, **{name: value})


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


REFUSED = [
    ("tokens", ints(5, 6, 50), "tokens: got 5 to 50, allowed is 0 to 49"),
    ("tokens", ints(5, -1, 7), "tokens: got -1 to 7, allowed is 0 to 49"),
    ("tokens", ints(5, 6), "positions: got int32 \\[3\\] contiguous, allowed is int32 \\[2\\]"),
    ("tokens", np.array([5, 6, 7]), "tokens: got int64 \\[3\\]"),
    ("tokens", ints(5, 0, 6, 0, 7, 0)[::2], "tokens: got int32 \\[3\\] not contiguous"),
    ("tokens", np.empty(0, np.int32), "tokens: got 0 rows, allowed is 1 to 16384"),
    ("positions", ints(16, 17, 2048), "positions: got 16 to 2048, allowed is 0 to 2047"),
    ("slots", ints(16, 17, 64), "slots: got 16 to 64, allowed is 0 to 63"),
    ("slots", ints(16, 17, 17), "slots: got 3 with 2 different, allowed is each once"),
    ("query_start", ints(0, 2), "query_start: got \\[0, 2\\], allowed is rising from 0 to 3"),
    ("query_start", ints(0, 1, 3), "query_start: got int32 \\[3\\] contiguous, allowed is int32 \\[2\\]"),
    ("context_len", ints(-1), "context_len: got -1, allowed is 0 or more"),
    ("context_len", ints(33), "context_len: got 33, allowed is at most 2 pages of 16"),
    ("page_table", ints(4, 1)[None], "page_table: got 4 to 4, allowed is 0 to 3"),
    ("page_table", ints(-1, 1)[None], "page_table: got -1 to -1, allowed is 0 to 3"),
    ("page_table", ints(0, 1), "page_table: got int32 \\[2\\] contiguous, allowed is int32 \\[1, 'any'\\]"),
    ("logit_rows", ints(0, 3), "logit_rows: got 0 to 3, allowed is 0 to 2"),
    ("logit_rows", ints(1, 1), "logit_rows: got \\[1, 1\\], allowed is ascending"),
    (
        "ancestors",
        ints(1, 3)[:, None],
        "ancestors: got int32 \\[2, 1\\] contiguous, allowed is int32 \\[3, 'any'\\]",
    ),
    ("ancestors", ints(1, 1, 5)[:, None], "ancestors: row 1 got \\[0\\], allowed is itself \\(1\\)"),
    ("ancestors", ints(1, 7, 5)[:, None], "ancestors: row 1 got \\[0, 1, 2\\], allowed is itself \\(1\\)"),
    ("ancestors", np.empty((3, 0), np.int32), "ancestors: got 0 words a row, allowed is room for 3 rows"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_a_batch_that_does_not_fit_is_refused_naming_both_values(
    name: str, value: object, message: str
) -> None:
    which = target("small", "float32", machine_isas()[0], 1)
    which.allocate_cache(num_pages=4, page_size=16)
    with pytest.raises(EngineError, match=message):
        which.forward(broken(name, value))


def test_slots_outside_the_cache_are_not_moved() -> None:
    which = NativeTarget(MODELS["small"], DictWeights(weights_of("small")), dtype="float32", num_threads=1)
    with pytest.raises(EngineError, match="allocate the cache first"):
        which.move_cache(from_slots=ints(), to_slots=ints())
    which.allocate_cache(num_pages=2, page_size=16)
    with pytest.raises(EngineError, match="from_slots: got 0 to 32, allowed is 0 to 31"):
        which.move_cache(from_slots=ints(0, 32), to_slots=ints(0, 1))
    with pytest.raises(EngineError, match="to_slots: got -1 to 1, allowed is 0 to 31"):
        which.move_cache(from_slots=ints(0, 1), to_slots=ints(-1, 1))
    with pytest.raises(EngineError, match=r"to_slots: got int32 \[1\] contiguous, allowed is int32 \[2\]"):
        which.move_cache(from_slots=ints(0, 1), to_slots=ints(1))


def test_without_memory_for_a_new_cache_the_old_one_is_not_used_any_more() -> None:
    which = NativeTarget(MODELS["small"], DictWeights(weights_of("small")), dtype="float32", num_threads=1)
    which.allocate_cache(num_pages=2, page_size=16)
    with address_space(4 << 30), pytest.raises(CapacityError, match="67108863 pages of 31 tokens needs"):
        which.allocate_cache(num_pages=2**26 - 1, page_size=31)
    with pytest.raises(EngineError, match="allocate the cache first"):
        which.forward(one_sequence([1, 2], page_size=16))
    run_whole(which, [1, 2])


@alone
def test_a_pass_without_memory_says_what_it_wanted_and_leaves_everything_usable() -> None:
    config = tiny_config(
        intermediate_size=8192, max_context_len=2048
    )  # rows of 16 KB, which no heap has left over
    weights = DictWeights(random_weights(config, seed=2))
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 1900).tolist()
    batch = dataclasses.replace(one_sequence(token_ids, page_size=16), logit_rows=np.array([1899], np.int32))
    which, fresh = (NativeTarget(config, weights, dtype="bfloat16", num_threads=n) for n in (2, 1))
    for one in (which, fresh):
        one.allocate_cache(num_pages=NUM_SLOTS // 16, page_size=16)
    wanted = r"a pass of 1900 rows: no memory for the rows of a pass: \d{8} bytes"
    for _ in range(2):
        with address_space(1 << 22), pytest.raises(EngineError, match=wanted):
            which.forward(batch)
    np.testing.assert_array_equal(which.forward(batch).logits, fresh.forward(batch).logits)


@alone
def test_a_matrix_and_a_product_without_memory_are_refused_and_take_none() -> None:
    pool, arena = Pool(2), Arena()
    matrix = Matrix(arena, pool, dtype="float32", num_outputs=32, num_inputs=4096)
    matrix.pack(np.ones((32, 4096), np.float32))
    x = np.ones((4096, 4096), np.float32)
    held = arena.num_bytes
    for _ in range(3):
        with address_space(1 << 24):
            with pytest.raises(NativeError, match="no memory for the inputs of a product: 83886080 bytes"):
                matrix.apply(x)
            with pytest.raises(NativeError, match="no memory for weights: 268435456 bytes"):
                Matrix(arena, pool, dtype="float32", num_outputs=16384, num_inputs=4096)
    assert arena.num_bytes == held
    assert (matrix.apply(x) == 4096).all()


FORK = """
import os
import numpy as np
from dspark_plugins.native.binding import Arena, Matrix, Pool

pool, arena = Pool(2), Arena()
matrix = Matrix(arena, pool, dtype="int8", num_outputs=700, num_inputs=50)
matrix.pack(np.random.default_rng(0).standard_normal((700, 50)).astype(np.float32))
x = np.ones((3, 50), np.float32)
before = matrix.apply(x)
child = os.fork()
if not child:
    os._exit(0 if np.array_equal(matrix.apply(x), before) else 1)
assert os.waitpid(child, 0)[1] == 0 and np.array_equal(matrix.apply(x), before)
"""


def test_a_forked_process_computes_without_its_parents_threads() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_more_rows_than_configured_and_a_missing_cache_are_refused() -> None:
    weights = DictWeights(weights_of("small"))
    which = NativeTarget(MODELS["small"], weights, dtype="float32", num_threads=1, max_rows=2)
    with pytest.raises(EngineError, match="allocate the cache first"):
        which.forward(one_sequence([1, 2], page_size=16))
    which.allocate_cache(num_pages=1, page_size=16)
    with pytest.raises(EngineError, match="tokens: got 3 rows, allowed is 1 to 2"):
        which.forward(one_sequence([1, 2, 3], page_size=16))


def test_what_cannot_be_loaded_is_refused_naming_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = MODELS["small"], dict(weights_of("small"))
    with pytest.raises(
        ConfigError, match="dtype is 'float16', allowed with the native executor are float32, bf"
    ):
        NativeTarget(config, DictWeights(weights), dtype="float16")
    with pytest.raises(ConfigError, match="feature layer is 3, allowed is -1 to 2"):
        NativeTarget(config, DictWeights(weights), dtype="float32", feature_layer_ids=(3,))
    with pytest.raises(ConfigError, match="num_threads is 0, allowed is 1 to 256"):
        NativeTarget(config, DictWeights(weights), dtype="float32", num_threads=0)
    weights["layers.1.mlp.up_proj.weight"] = np.zeros((64, 31), np.float32)
    with pytest.raises(
        CheckpointError, match="up_proj.weight: got \\[64, 31\\], the configuration says \\[64, 32\\]"
    ):
        NativeTarget(config, DictWeights(weights), dtype="float32")
    odd = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, num_kv_heads=3))
    with pytest.raises(ConfigError, match="4 heads, 3 key heads"):
        NativeTarget(odd, DictWeights(weights), dtype="float32")
    monkeypatch.setenv("DSPARK_NATIVE_ISA", "neon")
    with pytest.raises(
        ConfigError, match="DSPARK_NATIVE_ISA is 'neon', allowed are avx512, avxvnni, avx2, portable"
    ):
        NativeTarget(config, DictWeights(weights_of("small")), dtype="float32")
    monkeypatch.delenv("DSPARK_NATIVE_ISA")
    which = target("small", "float32", machine_isas()[0], 1)
    with pytest.raises(CapacityError, match="0 pages of 16 tokens"):
        which.allocate_cache(num_pages=0, page_size=16)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="threads are pinned where there are two processors"
)
@pytest.mark.parametrize("pin", [False, True])
def test_worker_threads_are_pinned_where_that_is_asked_for(pin: bool) -> None:
    def narrow() -> set[int]:
        tasks = {int(name) for name in os.listdir("/proc/self/task")}
        return {task for task in tasks if len(os.sched_getaffinity(task)) == 1}

    before = narrow()
    checkpoint = TargetCheckpoint(
        config=MODELS["small"], weights=DictWeights(weights_of("small")), tokenizer=None
    )
    target = make_target(
        checkpoint,
        executor="native",
        dtype="float32",
        layer_ids=(),
        config=ServeConfig(num_threads=2, pin_threads=pin),
    )
    assert target.name == "native"
    assert len(narrow() - before) == int(pin)


@pytest.mark.parametrize("touch", [False, True])
def test_the_cache_is_resident_from_the_start_where_that_is_asked_for(touch: bool) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    target = NativeTarget(
        MODELS["small"], DictWeights(weights_of("small")), dtype="float32", touch_cache=touch
    )
    num_pages = (64 << 20) // target.cache_page_bytes(16)
    before = resident()
    target.allocate_cache(num_pages=num_pages, page_size=16)
    assert (resident() - before > 60 << 20) is touch


def test_touching_a_cache_leaves_what_is_in_it() -> None:
    which, text = target("small", "bfloat16", isa(), 2), tokens_of("small", 40)
    wanted = run_whole(which, text).logits
    sequence = Sequence(pages=[0, 1, 2])
    which.allocate_cache(num_pages=NUM_SLOTS // 16, page_size=16)
    which.forward(step_batch([(sequence, text[:-1])], page_size=16))
    which._decoder.touch_cache()
    sequence.cached = text[:-1]
    last = which.forward(step_batch([(sequence, text[-1:])], page_size=16))
    np.testing.assert_array_equal(last.logits[0], wanted[-1])
