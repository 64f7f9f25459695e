"""What is compiled ahead of time is what launchers choose, and what they pass is what kernels take."""

from __future__ import annotations

import importlib

import pytest
from dspark_plugins.kernels import plans
from dspark_plugins.kernels.chips import CHIPS
from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.sets import BLOCK_SIZES, SHAPES, variants_for
from dspark_plugins.kernels.signatures import MODULES, SIGNATURES, arguments_of
from dspark_plugins.tensorrt.operations import OPERATIONS


@pytest.mark.parametrize("kernel", SIGNATURES)
def test_signatures_tell_the_arguments_of_the_kernels(kernel: str) -> None:
    function = getattr(importlib.import_module(f"dspark_plugins.kernels.{MODULES[kernel]}"), kernel)
    names = [name for name, _ in SIGNATURES[kernel]]
    assert function.arg_names[: len(names)] == names
    forms = [v for shape in SHAPES.values() for v in variants_for(shape, dtype="bf16") if v.kernel == kernel]
    assert forms, "no set has this kernel"
    for form in forms:
        assert set(function.arg_names[len(names) :]) == set(form.constants)
        assert all(not kind.startswith(("*io", "*input", "*weight")) for _, kind in arguments_of(form))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("mask", [plans.CHAIN, plans.TREE])
def test_every_pass_finds_its_form_in_the_set(name: str, mask: int) -> None:
    shape = SHAPES[name]
    ready = {variant.key for variant in variants_for(shape, dtype="bf16", window=True)}
    keys = "fp32" if shape.qk_norm else "bf16"
    for rows in [*range(1, 70), 500, 5000]:
        for num_sequences in (1, 3):
            pieces = plans.num_splits(
                num_rows=rows * num_sequences, num_sequences=num_sequences, max_context=40_000
            )
            for window in (False, True):
                chosen = plans.attention(
                    num_heads=shape.num_heads,
                    num_kv_heads=shape.num_kv_heads,
                    head_dim=shape.head_dim,
                    dtype="bf16",
                    input_dtype=keys,
                    rows=rows,
                    fixed_rows=0,
                    mask=mask,
                    rope=True,
                    window=window,
                    write=True,
                    split=pieces > 1,
                )
                assert chosen.key in ready, (rows, chosen.key)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_set_holds_every_form_that_an_engine_of_the_target_stores(name: str, dtype: str) -> None:
    shape, rank = SHAPES[name], 256
    ready = {variant.key for variant in variants_for(shape, dtype=dtype, rank=rank)}
    keys = "fp32" if shape.qk_norm else dtype  # normed queries and keys stay fp32 in the exported graphs
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    cache, ints = (-1, 2, kv_heads, dim), ["i32"] * 10
    types = [keys, keys, dtype, dtype, *ints]
    paged = [(-1, heads, dim), (-1, kv_heads, dim), (-1, kv_heads, dim), cache, *[(-1, -1)] * 8]
    attributes = {"page_size": 16, "scale": 0.1, "window": 0}
    stored = OPERATIONS["DSparkPagedAttention"](attributes).variants(paged, types)
    for size in BLOCK_SIZES:
        rows = [(-1, size, heads, dim), (-1, size, kv_heads, dim), (-1, size, kv_heads, dim), cache]
        stored += OPERATIONS["DSparkBlockAttention"](attributes).variants([*rows, *[(-1,)] * 10], types)
        sample = OPERATIONS["DSparkBlockSample"]({"head": 1, "confidence": 2, "mapped": 0, "previous": 0})
        given = {"base_logits": (-1, size, shape.vocab_size), "hidden": (-1, size, shape.hidden_size)}
        given |= {"markov_in": (shape.vocab_size, rank), "markov_out": (shape.vocab_size, rank)}
        act = {"fp32": "fp32", "act": dtype, "i32": "i32", "i64": "i64"}
        stored += sample.variants(
            [given.get(port.name, (-1,)) for port in sample.inputs],
            [act[port.dtype] for port in sample.inputs],
        )
    assert {variant.key for variant in stored} <= ready


@pytest.mark.parametrize("name", SHAPES)
def test_a_grid_covers_every_row_of_a_ragged_batch(name: str) -> None:
    shape = SHAPES[name]
    for rows in ([1, 1, 1], [5, 0, 130, 1], [64], [63, 65]):
        variant = next(v for v in variants_for(shape, dtype="bf16") if v.constants.get("BLOCK_M") == 64)
        tiles, kv_heads, _ = plans.attention_grid(
            variant, num_rows=sum(rows), num_sequences=len(rows), num_pieces=1
        )
        block_rows = 64 // (shape.num_heads // shape.num_kv_heads)
        start, needed = 0, 0
        for i, n in enumerate(rows):
            if n:
                needed = start // block_rows + i + plans.cdiv(n, block_rows)
            start += n
        assert needed <= tiles and kv_heads == shape.num_kv_heads


def test_forms_that_differ_have_different_keys() -> None:
    forms = [
        v
        for shape in SHAPES.values()
        for d in ("bf16", "fp16", "fp32")
        for v in variants_for(shape, dtype=d, window=True)
    ]
    by_key: dict[str, Variant] = {}
    for form in forms:
        assert by_key.setdefault(form.key, form) == form


def test_how_many_programs_fit() -> None:
    ampere = CHIPS[86]
    assert ampere.programs(num_threads=128, registers=32, shared_bytes=0) == 12  # threads
    assert ampere.programs(num_threads=128, registers=255, shared_bytes=0) == 2  # registers
    assert ampere.programs(num_threads=32, registers=32, shared_bytes=30 * 1024) == 3  # shared memory
    assert ampere.programs(num_threads=32, registers=32, shared_bytes=100 * 1024) == 0  # does not fit
    assert CHIPS[80].programs(num_threads=32, registers=32, shared_bytes=100 * 1024) == 1


def test_the_least_time_is_set_by_what_takes_longer() -> None:
    chip = CHIPS[90]
    assert chip.floor_s(num_bytes=3.35e12, flops=0.0) == pytest.approx(1.0)
    assert chip.floor_s(num_bytes=0.0, flops=2 * 989e12) == pytest.approx(2.0)
