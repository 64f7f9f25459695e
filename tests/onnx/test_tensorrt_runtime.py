"""The TensorRT runtime, driven by ONNX Runtime: buffers, buckets, padding, manifest, and the real engine on top."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CheckpointError, ConfigError, EngineError
from dspark.executors.interface import DraftBatch, StepBatch
from dspark.executors.tensorrt_bindings import VerifyShape, target_bindings
from dspark.executors.tensorrt_buckets import EngineShapes, bucket, drafter_buckets, target_buckets
from dspark.executors.tensorrt_buffers import BufferPlan
from dspark.executors.tensorrt_cuda import CudaSession
from dspark.executors.tensorrt_device import CudaDevice
from dspark.executors.tensorrt_loading import built_engine, load_engine_pair
from dspark.executors.torch_drafter import TorchBlockDrafter
from dspark.executors.torch_target import TorchTarget
from dspark.models.loading import load_target
from dspark_plugins.tensorrt.module import load_tensorrt, tensorrt_name
from hypothesis import given
from hypothesis import strategies as st
from support.engines import answers, make_engine, make_request
from support.tiny_drafters import write_good_drafter
from support.tiny_models import tiny_config, write_tiny_target

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.exported_pairs import PAGE, SHAPES, Home

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("runtime"))


# Pure parts


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 30), st.integers(1, 99))
def test_buffers_do_not_share_memory(rows: int, tokens: int, pages: int, slots: int) -> None:
    bindings = target_bindings(
        tiny_config(), precision="fp16", feature_layer_ids=(0,), verify=VerifyShape(4, 50)
    )
    sizes = {"R": rows, "T": tokens, "M": tokens, "P": pages, "W": 0, "S": slots, "Q": 4 * rows}
    used = [b for b in bindings if b.kind != "weight"]
    plan = BufferPlan.of(used, sizes)
    assert set(plan.buffers) == {b.name for b in used}
    links = {name: buffer for name, buffer in plan.buffers.items() if buffer.offset < 0}
    assert {name: buffer.num_bytes for name, buffer in links.items()} == {"draft_probs": 4 * 4 * rows * 50}
    places = sorted(
        (b for b in plan.buffers.values() if b.binding.name not in links), key=lambda buffer: buffer.offset
    )
    ends = [*(buffer.offset for buffer in places[1:]), plan.device_bytes]
    for buffer, end in zip(places, ends, strict=True):
        assert buffer.offset % 256 == 0 and buffer.offset + max(buffer.num_bytes, 1) <= end
        assert (buffer.offset < plan.host_bytes) == (buffer.binding.kind != "cache")
    assert plan.buffers["query_start"].num_bytes == 4 * (rows + 1)
    assert plan.buffers["kv_cache.0"].num_bytes == 2 * slots * 2 * 2 * 8
    assert plan.buffers["ancestors"].num_bytes == 0


@given(st.integers(0, 500), st.integers(1, 500))
def test_a_bucket_holds_what_is_wanted_and_not_much_more(wanted: int, largest: int) -> None:
    if wanted > largest:
        with pytest.raises(
            EngineError, match=rf"rows: got {wanted}, the engine was made for at most {largest}"
        ):
            bucket("rows", wanted, largest)
        return
    found = bucket("rows", wanted, largest)
    assert max(wanted, 1) <= found <= largest and found < 2 * max(wanted, 1)


def test_every_decoding_step_has_a_prepared_shape() -> None:
    shapes = EngineShapes(
        max_sequences=6, max_tokens=100, max_logit_rows=48, max_pages=9, max_new_rows=60, graph_tokens=40
    )
    prepared = target_buckets(shapes)
    blocks = drafter_buckets(shapes, 7)
    for rows in range(1, 7):
        for tokens in range(rows, 8 * rows + 1):
            size = bucket("t", tokens, 100)
            wanted = {"R": bucket("r", rows, 6), "T": size, "M": size, "P": 9, "W": 0}
            assert (wanted in prepared) == (size <= 40)
        for new_rows in range(8 * rows + 1):
            size = bucket("n", new_rows, 60)
            assert ({"R": bucket("r", rows, 6), "N": size, "P": 9} in blocks) == (size <= 40)
    assert len(prepared) == len({tuple(sizes.items()) for sizes in prepared})


# Executors


def _batch(rng: np.random.Generator, rows: list[int], context: list[int], table: np.ndarray) -> StepBatch:
    owner = np.repeat(np.arange(len(rows)), rows)
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    positions = (np.arange(len(owner)) - start[owner] + np.array(context)[owner]).astype(np.int32)
    slots = table[owner, positions // PAGE] * PAGE + positions % PAGE
    return StepBatch(
        tokens=rng.integers(0, 50, len(owner)).astype(np.int32),
        positions=positions,
        query_start=start,
        context_len=np.array(context, np.int32),
        page_table=table[: len(rows)],
        slots=slots.astype(np.int32),
        logit_rows=np.arange(len(owner), dtype=np.int32)[:: 1 + len(rows) % 2],
    )


def test_passes_equal_the_torch_executor_and_their_outputs_stay(home: Home) -> None:
    rng = np.random.default_rng(0)
    target = home.pair().target
    torch_target = TorchTarget(
        home.target.config, home.target.weights, dtype="float32", feature_layer_ids=(0, 1)
    )
    for executor in (target, torch_target):
        executor.allocate_cache(num_pages=24, page_size=PAGE)
        assert executor.cache_page_bytes(PAGE) == 3 * 2 * PAGE * 2 * 8 * 4
    target._runner._host[:] = 255  # NaN in every float: nothing may be read that was not written
    table = rng.permutation(24).astype(np.int32).reshape(4, 6)
    context = [0, 0, 0]
    earlier: list[tuple[Any, Any]] = []
    for rows in ([7, 1, 3], [1, 5, 2], [1, 1, 1], [4, 1, 5]):
        batch = _batch(rng, rows, context, table)
        earlier.append((target.forward(batch), torch_target.forward(batch)))
        context = [have + more for have, more in zip(context, rows, strict=True)]
        for mine, theirs in earlier:  # what was given back before is not what the buffers hold now
            np.testing.assert_allclose(mine.logits, theirs.logits, atol=1e-4)
            np.testing.assert_allclose(mine.features, theirs.features, atol=1e-4)
            np.testing.assert_array_equal(mine.argmax, theirs.argmax)
            assert mine.finite.all() and mine.finite.dtype == np.bool_


def test_a_tree_equals_the_torch_executor(home: Home) -> None:
    rng = np.random.default_rng(1)
    outputs = []
    batch = _batch(rng, [5, 3], [0, 0], np.arange(8, dtype=np.int32).reshape(2, 4))
    at = batch.positions
    tree = StepBatch(
        **{name: getattr(batch, name) for name in StepBatch.__dataclass_fields__ if name != "ancestors"},
        ancestors=(1 | (1 << at)).astype(np.int32)[:, None],
    )
    for executor in (
        home.pair().target,
        TorchTarget(home.target.config, home.target.weights, dtype="float32"),
    ):
        executor.allocate_cache(num_pages=8, page_size=PAGE)
        outputs.append((executor.forward(batch).logits, executor.forward(tree).logits))
    np.testing.assert_allclose(outputs[0][0], outputs[1][0], atol=1e-4)
    np.testing.assert_allclose(outputs[0][1], outputs[1][1], atol=1e-4)
    assert np.abs(outputs[0][0] - outputs[0][1]).max() > 0.1


def test_context_rows_that_wait_are_written_in_order(home: Home) -> None:
    rng = np.random.default_rng(2)
    width = 64
    shapes = EngineShapes(
        max_sequences=2, max_tokens=8, max_logit_rows=8, max_pages=4, max_new_rows=3, graph_tokens=2
    )
    block = home.pair(shapes).drafter
    assert block is not None
    embedding = home.target.weights.float32("embed_tokens.weight")
    head = home.target.weights.float32("lm_head.weight")
    torch_drafter = TorchBlockDrafter(
        home.drafter, target_embedding=embedding, target_head=head, dtype="float32"
    )
    found = []
    rows = [
        (rng.standard_normal((n, width)).astype(np.float32), np.arange(a, a + n, dtype=np.int32))
        for a, n in ((0, 8), (2, 1), (8, 2), (9, 1))  # more than a call takes, and two slots written again
    ]
    batch = DraftBatch(
        anchors=np.array([4, 7], np.int32),
        anchor_positions=np.array([10, 3], np.int32),
        context_len=np.array([10, 3], np.int32),
        page_table=np.array([[0, 1, 2], [0, 3, -1]], np.int32),
    )
    for executor in (block.executor, torch_drafter):
        executor.allocate_cache(num_pages=4, page_size=PAGE)
        for features, positions in rows:
            executor.append_context(features=features, positions=positions, slots=positions)
        found.append(executor.draft(batch))
    np.testing.assert_allclose(found[0].hidden, found[1].hidden, atol=1e-4)
    np.testing.assert_allclose(found[0].base_logits, found[1].base_logits, atol=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_heads_on_the_host_equal_those_of_torch(head: Any, tmp_path: Path) -> None:
    made = Home(tmp_path, random=True, head=head, draft_vocab=20, small_w1=head == "vanilla")
    drafter = made.pair().drafter
    assert drafter is not None
    mine = drafter.executor
    tables = [made.target.weights.float32(f"{name}.weight") for name in ("embed_tokens", "lm_head")]
    theirs = TorchBlockDrafter(
        made.drafter, target_embedding=tables[0], target_head=tables[1], dtype="float32"
    )
    rng = np.random.default_rng(3)
    states = [mine.initial_state(3), theirs.initial_state(3)]
    for _ in range(3):
        step: Any = {
            "previous": rng.integers(0, 50, 3).astype(np.int32),
            "hidden": rng.standard_normal((3, 32)).astype(np.float32),
        }
        rated = [one.confidence_logits(**step) for one in (mine, theirs)]
        biases = []
        for which, one in enumerate((mine, theirs)):
            bias, states[which] = one.head_step(**step, state=states[which])
            biases.append(bias)
        for pair in (rated, biases, states):
            if pair[1] is None:
                assert pair[0] is None
                continue
            np.testing.assert_allclose(pair[0], pair[1], atol=1e-5)


# The real engine


@pytest.mark.parametrize("policy", ["none", "fixed:3"])
def test_greedy_answers_are_those_of_the_torch_executor(policy: str, home: Home) -> None:
    drafts = policy != "none"
    torch_engine = make_engine(
        home.folder / "target",
        drafter=home.folder / "drafter" if drafts else "none",
        policy=policy,
        page_size=PAGE,
        cache_bytes=1 << 20,
    )
    engine = home.engine(policy)
    wanted, got = (
        answers(one, [make_request(prompt, max_tokens=20) for prompt in PROMPTS])
        for one in (torch_engine, engine)
    )
    assert got == wanted
    counts = [
        (one.stats().num_draft_tokens, one.stats().num_accepted_tokens) for one in (engine, torch_engine)
    ]
    assert (counts[0][1] > 0) == drafts
    # Steps differ in what fits into them; what is drafted and right does not depend on them alone.
    assert abs(counts[0][1] - counts[1][1]) <= 0.1 * counts[1][1]
    assert engine.stats().num_drafter_faults == 0


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_sampled_answers_are_those_of_the_torch_executor(head: Any, tmp_path: Path) -> None:
    made = Home(tmp_path, head=head)
    params = [
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_p": 0.9, "seed": 6},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "top_k": 5, "seed": 7},
    ]
    wanted, got = (
        answers(engine, [make_request(p, **more) for p, more in zip(PROMPTS, params, strict=True)])
        for engine in (
            make_engine(
                made.folder / "target",
                drafter=made.folder / "drafter",
                policy="fixed:3",
                page_size=PAGE,
                cache_bytes=1 << 20,
            ),
            made.engine("fixed:3"),
        )
    )
    assert got == wanted


# What is refused


def test_a_pass_larger_than_the_engine_is_refused(home: Home) -> None:
    target = home.pair().target
    target.allocate_cache(num_pages=24, page_size=PAGE)
    table = np.arange(24, dtype=np.int32).reshape(1, 24)
    with pytest.raises(EngineError, match="rows of a pass: got 27, the engine was made for at most 26"):
        target.forward(_batch(np.random.default_rng(0), [27], [0], table))
    with pytest.raises(EngineError, match=r"page_table: got \[1, 24\]"):
        target.forward(_batch(np.random.default_rng(0), [2], [0], table))


def test_an_export_of_another_pair_is_refused(home: Home, tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "other", seed=1, max_context_len=64)
    write_good_drafter(tmp_path / "drafter", home.folder / "target", noise=0.2)
    drafter = load_drafter_checkpoint(tmp_path / "drafter", target=home.target.config)
    right: dict[str, Any] = {
        "target": home.target,
        "drafter": home.drafter,
        "page_size": PAGE,
        "shapes": SHAPES,
        "backend": "onnxruntime",
    }
    for field, changed in {
        "target_hash": {"target": load_target(tmp_path / "other")},
        "drafter_hash": {"drafter": drafter},
        "page_size": {"page_size": 16},
    }.items():
        with pytest.raises(CheckpointError, match=f"{field}: the export was made for"):
            load_engine_pair(home.folder / "onnx", **right | changed)
    with pytest.raises(CheckpointError, match=r"has no export.json; make it with `dspark-build export`"):
        load_engine_pair(tmp_path, **right)
    (tmp_path / "target.onnx").write_bytes(b"no graph")
    from dspark.executors.onnx_session import OnnxSession

    with pytest.raises(CheckpointError, match=r"target.onnx: ONNX Runtime cannot run it"):
        OnnxSession(tmp_path / "target.onnx")


def test_the_shapes_of_a_built_engine_are_those_of_its_limits(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no engine.json; make it with `dspark-build engine`"):
        built_engine(tmp_path)
    limits = {"max_batch": 4, "max_tokens": 6, "max_pages": 18, "page_size": PAGE, "block_size": 4}
    told = {"format_version": 4, "limits": limits, "sm": 89, "tools": {"tensorrt": "tensorrt_rtx 1.7"}}
    (tmp_path / "engine.json").write_text(json.dumps(told))
    assert built_engine(tmp_path) == (SHAPES, 89, "tensorrt_rtx 1.7")
    (tmp_path / "engine.json").write_text(json.dumps(told | {"limits": {"max_batch": 4}}))
    with pytest.raises(CheckpointError, match=r"engine.json cannot be read: KeyError\('max_tokens'\)"):
        built_engine(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps(told | {"format_version": 1}))
    with pytest.raises(
        CheckpointError, match="format_version must be 4, got 1; make it again with `dspark-build"
    ):
        built_engine(tmp_path)


def test_every_call_of_the_tensorrt_session_exists() -> None:
    if tensorrt_name() != "tensorrt_rtx":
        pytest.skip("TensorRT for RTX is not installed")
    trt = load_tensorrt()
    cuda = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    files = [inspect.getfile(one) for one in (CudaSession, CudaDevice)]
    source = "".join(Path(file).read_text(encoding="utf-8") for file in files)
    called = set(re.findall(r'"(cuda[A-Z]\w+)"', source))
    called |= set(re.findall(r"\b(?:_cuda|runtime)\.(cuda\w+)", source))
    assert len(called) > 15
    for name in called:
        assert hasattr(cuda, name), name
    of_context = set(re.findall(r"\bcontext\.(\w+)\(", source))
    of_engine = set(re.findall(r"_engine\.(\w+)", source))
    assert len(of_context) > 4 and len(of_engine) > 4
    assert trt.DataType.HALF.itemsize == 2
    for owner, names in ((trt.IExecutionContext, of_context), (trt.ICudaEngine, of_engine)):
        for name in names:
            assert hasattr(owner, name), name


def test_without_a_gpu_the_tensorrt_session_says_what_is_missing() -> None:
    if _has_gpu():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="executor: tensorrt needs (a CUDA GPU|cuda-bindings)"):
        CudaDevice()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
