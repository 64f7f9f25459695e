"""What a plugin refuses, and what it leaves to others."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from dspark_plugins.kernels import plans
from dspark_plugins.tensorrt.attention import BlockAttention, PagedAttention
from dspark_plugins.tensorrt.block_sample import BlockSample
from dspark_plugins.tensorrt.forms import decode_forms, encode_forms, pick
from dspark_plugins.tensorrt.module import INSTALL, tensorrt_name
from dspark_plugins.tensorrt.operation import Buffer, Launch, Operation
from dspark_plugins.tensorrt.operations import OPERATIONS
from dspark_plugins.tensorrt.schedule import Schedule
from dspark_plugins.tensorrt.verify import Verify

if tensorrt_name() is None:
    pytest.skip(f"TensorRT is not installed: {INSTALL}", allow_module_level=True)

from support.plugin_launcher import InterpreterLauncher, describe, dynamic, plan_of, uncompiled

ATTENTION = {"page_size": 16, "scale": 0.125, "window": 0}
PAGED = [
    *((-1, 4, 16), (-1, 2, 16), (-1, 2, 16), (-1, 2, 2, 16), (-1, 8), (-1, 8)),
    *((-1, -1), (-1,), (-1,), (-1,), (-1,), (-1, -1)),
]


def paged(act: str, keys: str) -> list[str]:
    return [keys, keys, act, act, "fp32", "fp32", *["i32"] * 6, act, act]


def accepted(operation: Operation, dtypes: Sequence[str]) -> list[int]:
    """Return the ports that a plugin refuses when TensorRT asks about them one by one."""
    return [i for i in range(len(dtypes)) if not operation.accepts(i, dtypes[: i + 1])]


@pytest.mark.parametrize(("act", "keys"), [*product(["fp32", "fp16", "bf16"], repeat=2)])
def test_keys_are_of_the_networks_type_or_fp32(act: str, keys: str) -> None:
    refused = accepted(PagedAttention(ATTENTION), paged(act, keys))
    assert refused == ([] if keys in (act, "fp32") else [2, 3, 12, 13])


@pytest.mark.parametrize("port", range(14))
def test_every_port_refuses_another_type(port: int) -> None:
    dtypes = paged("fp16", "fp32")
    dtypes[port] = "i64" if dtypes[port] != "i64" else "i32"
    assert port in accepted(PagedAttention(ATTENTION), dtypes)


def test_only_rows_one_behind_the_other_are_taken() -> None:
    launcher = InterpreterLauncher()
    from dspark_plugins.tensorrt.plugin import trt

    types = [torch.float16] * 4 + [torch.float32] * 2 + [torch.int32] * 6
    inputs = [dynamic(trt, s, t, unknown=[], most=[4] * len(s)) for s, t in zip(PAGED, types, strict=True)]
    built, _, creators = plan_of("DSparkPagedAttention", ATTENTION, inputs, launcher)
    assert creators and built.supports_format_combination(0, inputs, 12)
    inputs[0].desc.format = trt.TensorFormat.HWC8
    assert not built.supports_format_combination(0, inputs, 12)
    assert not built.supports_format_combination(1, inputs, 11)
    assert built.get_aliased_input(0) == -1 and built.get_aliased_input(1) == 3


@pytest.mark.parametrize(
    ("index", "shape", "told"),
    [
        (0, (-1, 5, 16), "divide"),
        (0, (-1, -1, 16), "fixed"),
        (1, (-1, 2, 8), "head sizes"),
        (3, (-1, 2, 4, 16), "kv_cache must be"),
    ],
)
def test_heads_that_do_not_belong_together(index: int, shape: tuple[int, ...], told: str) -> None:
    shapes = list(PAGED)
    shapes[index] = shape
    with pytest.raises(ValueError, match=f"DSparkPagedAttention: .*{told}"):
        PagedAttention(ATTENTION).variants(shapes, paged("fp16", "fp16"))


@pytest.mark.parametrize(
    ("operation", "values", "told"),
    [
        (PagedAttention, {"scale": 1.0}, "page_size, window"),
        (BlockAttention, {}, "page_size, scale, window"),
        (BlockSample, {"head": 4, "confidence": 0, "mapped": 0, "previous": 0}, "head must be 0 to 3, got 4"),
        (BlockSample, {"head": 0, "confidence": 2, "mapped": 0, "previous": 0}, "W1"),
        (Verify, {"max_depth": 0, "tree": 0, "probs": 0, "mapped": 0}, "at least 1, got 0"),
    ],
)
def test_attributes_that_cannot_be(
    operation: type[Operation], values: dict[str, int | float], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        operation(values)


def test_a_trees_form_is_left_out_where_there_are_no_masks() -> None:
    operation, dtypes = PagedAttention(ATTENTION), paged("fp16", "fp16")
    chains = operation.variants([*PAGED[:11], (-1, 0)], dtypes)
    trees = operation.variants([*PAGED[:11], (-1, 2)], dtypes)
    both = operation.variants(PAGED, dtypes)
    assert {v.key for v in chains} | {v.key for v in trees} == {v.key for v in both}
    assert all(v.constants.get("MASK", plans.CHAIN) == plans.CHAIN for v in chains)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (9, 3), (32, 8), (28, 4), (16, 1), (71, 1)])
@pytest.mark.parametrize("words", [0, 1])
def test_a_plan_has_every_form_that_a_pass_can_choose(heads: tuple[int, int], words: int) -> None:
    num_heads, kv_heads = heads
    shapes = list(PAGED)
    shapes[0], shapes[3] = (-1, num_heads, 16), (-1, 2, kv_heads, 16)
    shapes[1] = shapes[2] = (-1, kv_heads, 16)
    operation, dtypes = PagedAttention(ATTENTION), paged("fp16", "fp16")
    stored = {variant.key for variant in operation.variants(shapes, dtypes)}
    for rows, pages in product(range(1, 200), (1, 64)):
        sizes = {0: rows, 1: rows, 2: rows, 3: 512, 4: rows, 5: rows, 6: 1, 7: 2, 8: 1, 9: rows, 10: rows}
        given = [
            Buffer(16 * i, (sizes.get(i, rows), *shape[1:]), dtype)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
        ]
        given[6] = Buffer(96, (1, pages), "i32")
        given[11] = Buffer(176, (rows, words), "i32")
        out = Buffer(512, given[0].shape, "fp16")
        steps = operation.launches(given, [out, given[3]], (1024, 2048), 1)
        assert {step.variant.key for step in steps if isinstance(step, Launch)} <= stored, (rows, pages)


def test_smaller_shapes_never_need_more_scratch_memory() -> None:
    random = np.random.default_rng(0)
    operations: list[tuple[Operation, list[tuple[int | str, ...]]]] = [
        (
            PagedAttention(ATTENTION),
            [("T", 4, 16), *[(1,)] * 2, ("S", 2, 2, 16), *[(1,)] * 2, ("R", "P"), *[(1,)] * 4, ("T", 0)],
        ),
        (BlockAttention(ATTENTION), [("R", 7, 4, 16), *[(1,)] * 10, ("R", "P"), ("R",), ("R",)]),
        (
            BlockSample({"head": 3, "confidence": 2, "mapped": 0, "previous": 0}),
            [("R", 7, 300), ("R", 7, 24), *[("R",)] * 9, (300, 8)],
        ),
        (
            Verify({"max_depth": 4, "tree": 0, "probs": 0, "mapped": 0}),
            [("T", 300), ("T",), ("R",), *[("R",)] * 7],
        ),
        (Schedule({}), [("R", 7), ("R",), (2,), (1,), (1,)]),
    ]
    largest = {"T": 600, "R": 9, "P": 70, "S": 1120}
    for operation, shapes in operations:
        most = operation.scratch([tuple(largest[d] if isinstance(d, str) else d for d in s) for s in shapes])
        for _ in range(300):
            sizes = {name: int(random.integers(0, n + 1)) for name, n in largest.items()}
            less = operation.scratch(
                [tuple(sizes[d] if isinstance(d, str) else d for d in s) for s in shapes]
            )
            assert all(a <= b for a, b in zip(less, most, strict=True)), (operation.name, sizes)


def test_damaged_or_foreign_kernels_are_told() -> None:
    variant = plans.schedule()
    table, packed = encode_forms(uncompiled([variant]).values())
    assert pick(decode_forms(table, packed), variant).cubin == variant.key.encode()
    with pytest.raises(ValueError, match="cannot be read"):
        decode_forms(table, packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="damaged"):
        decode_forms(table.replace(b'"sha256":"', b'"sha256":"0'), packed)
    with pytest.raises(ValueError, match="no compiled kernel walk_kernel"):
        pick(decode_forms(table, packed), plans.walk(dtype="fp32", tree=False, probs=False, mapped=False))
    with pytest.raises(ValueError, match="build the engine anew"):
        decode_forms(table.replace(b'"symbol"', b'"name"'), packed)
    older = table.replace(b"block_size", b"block_len")
    with pytest.raises(ValueError, match="build the engine anew"):
        pick(decode_forms(older, packed), variant)


def test_a_plan_without_kernels_is_refused() -> None:
    from dspark_plugins.tensorrt.plugin import register, trt

    creators = register()
    creator = next(c for c in creators if c.name == "DSparkSchedule")
    with pytest.raises(ValueError, match="kernel_table, cubins"):
        creator.create_plugin("node", trt.PluginFieldCollection([]), trt.TensorRTPhase.RUNTIME)
    assert "kernel_table, cubins" in str(creators[0].tools.failures[0])  # TensorRT's own words say less
    plugin = creator.create_plugin("node", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
    inputs = [dynamic(trt, (2,), torch.float32, unknown=[], most=[2])] * 5
    with pytest.raises(RuntimeError, match="no compiler was registered"):
        plugin.configure_plugin(inputs, [])
    for _ in range(99):
        with pytest.raises(ValueError, match="inputs must be confidence, num_drafts"):
            plugin.configure_plugin(inputs[:4], [])
    assert len(creators[0].tools.failures) == 32


def test_stored_fields_stay_where_they_are_when_asked_for_again() -> None:
    from dspark_plugins.tensorrt.plugin import trt

    types = [torch.float16] * 4 + [torch.float32] * 2 + [torch.int32] * 6
    inputs = [dynamic(trt, s, t, unknown=[], most=[4] * len(s)) for s, t in zip(PAGED, types, strict=True)]
    built, first, creators = plan_of("DSparkPagedAttention", ATTENTION, inputs, InterpreterLauncher())
    pointed_at = [*built._arrays]
    assert creators and built.get_fields_to_serialize() is first
    assert len(pointed_at) == len(first) and all(map(operator.is_, built._arrays, pointed_at))


def test_libraries_are_found_without_a_home_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("in the way")
    program = (
        "from dspark_plugins.tensorrt import module; module._BESIDE = None; "
        "print(module.load_tensorrt().__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, tensorrt_name()), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_module_that_was_imported_first_is_refused_and_does_not_end_the_process_later() -> None:
    name = tensorrt_name()
    if name != "tensorrt_rtx":
        pytest.skip("TensorRT for RTX is not installed")
    program = "import tensorrt_rtx; from dspark_plugins.tensorrt.module import load_tensorrt; load_tensorrt()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "was imported before dspark_plugins.tensorrt" in done.stderr


def test_another_element_type_is_none_of_ours() -> None:
    from dspark_plugins.tensorrt.plugin import register, trt

    creators = register()
    plugin = creators[-1].create_plugin("node", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
    desc = trt.DynamicPluginTensorDesc()
    desc.desc = describe(trt, (2, 7), torch.float32)
    desc.desc.type = trt.int8
    assert not plugin.supports_format_combination(0, [desc] * 9, 5)


def test_running_a_plugin_needs_neither_torch_nor_the_triton_language() -> None:
    program = (
        "import sys; from dspark_plugins.tensorrt import plugin, driver\n"
        "plugin.register()\n"
        "sys.exit(' '.join({'torch', 'triton', 'onnx', 'dspark'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_operation_of_the_contract_has_a_plugin() -> None:
    names = {"PagedAttention", "BlockAttention", "BlockSample", "Verify", "Schedule"}
    assert set(OPERATIONS) == {f"DSpark{name}" for name in names}
