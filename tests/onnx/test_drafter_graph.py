"""The exported drafter on ONNX Runtime equals the torch drafter, and draws what the plain operation draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dspark.executors.interface import DraftBatch
from dspark.executors.tensorrt_bindings import SampleHead
from dspark_plugins.reference.block_sample import block_sample
from support.dense_drafter import PAGE_SIZE, Bench
from support.tiny_drafters import tiny_target_config

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from dspark_build.export_block_sample import block_sample_function  # noqa: E402  (needs onnx)
from support.onnx_models import cpu_session, run_operation  # noqa: E402

LENGTHS = [9, 1, 14, 0]
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"head": "gated", "confidence_with_markov": False},
    "rnn": {"head": "rnn", "draft_vocab": 20},
    "none": {"head": "none", "confidence": False, "sliding_windows": (None, 5)},
    "reduced": {"draft_vocab": 20, "small_w1": True, "own_embedding": True, "greedy_confidence": True},
    "confident": {"head": "none", "own_head": True, "draft_vocab": 20},
}


def _session(bench: Bench, folder: Path) -> tuple[Any, list[str]]:
    """Export the bench's drafter beside tables of a target; return a session and the names of the caches."""
    from dspark_build.export_drafter import drafter_model
    from dspark_build.export_weights import WeightFile
    from onnx import TensorProto

    with (folder / "target.data").open("wb") as stream:
        target = WeightFile(stream, "target.data")
        target.add("embed_tokens", bench.embedding, TensorProto.FLOAT)
        target.add("lm_head", bench.lm_head, TensorProto.FLOAT)
    with (folder / "drafter.data").open("wb") as stream:
        model, bindings = drafter_model(
            bench.checkpoint,
            WeightFile(stream, "drafter.data"),
            precision="fp32",
            page_size=PAGE_SIZE,
            target_tensors={tensor.name: tensor for tensor in target.tensors},
            target_head=bench.lm_head,
        )
    path = folder / "drafter.onnx"
    onnx.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)
    names = [b.name for b in bindings if b.kind == "cache"]
    return cpu_session(str(path)), names


def _feeds(batch: DraftBatch, new: tuple[np.ndarray, np.ndarray, np.ndarray], padding: int) -> dict[str, Any]:
    """Return inputs with rows and blocks of padding behind the real ones, which must change nothing."""
    features, positions, slots = new
    num_sequences = len(batch.anchors)

    def padded(array: np.ndarray, value: float = 0) -> np.ndarray:
        return np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1), constant_values=value)

    zeros = np.zeros(num_sequences, np.float32)
    return {
        "features": padded(features, np.nan),
        "new_positions": padded(positions),
        "new_slots": padded(slots, -1),
        "anchors": padded(batch.anchors),
        "anchor_positions": padded(batch.anchor_positions),
        "context_len": padded(batch.context_len),
        "page_table": padded(batch.page_table, -1),
        "num_drafts": padded(np.array([4, 4, 2, 4], np.int32)[:num_sequences]),
        "seeds": padded(np.array([5, -7, 2**62, 0], np.int64)[:num_sequences]),
        "temperature": padded(zeros),
        "top_k": padded(zeros.astype(np.int32)),
        "top_p": padded(zeros + 1),
        "min_p": padded(zeros),
        "coupled": padded(zeros.astype(np.int32)),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_graph_equals_the_torch_drafter(kind: str, qk_norm: bool, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "drafter", tiny_target_config(qk_norm=qk_norm), **KINDS[kind])
    session, names = _session(bench, tmp_path)
    batch, slots = bench.batch(LENGTHS)
    size = len(bench.executor._k_cache[0])
    caches = {name: np.full((size, 2, 2, 8), np.nan, np.float32) for name in names}
    # The context comes in two parts: first without a block of its own, then with the block that reads it.
    cut = [length // 2 for length in LENGTHS]
    rows = [bench.features(length) for length in LENGTHS]
    parts = [[(0, to) for to in cut], list(zip(cut, LENGTHS, strict=True))]
    got: dict[str, Any] = {}
    for at, part in enumerate(parts):
        features = np.concatenate([row[a:b] for row, (a, b) in zip(rows, part, strict=True)])
        positions = np.concatenate([np.arange(a, b) for a, b in part]).astype(np.int32)
        where = np.concatenate([slot[a:b] for slot, (a, b) in zip(slots, part, strict=True)])
        bench.executor.append_context(features=features, positions=positions, slots=where)
        now = batch if at else replace(batch, context_len=np.zeros(4, np.int32))
        outputs = [output.name for output in session.get_outputs()]
        feeds = _feeds(now, (features, positions, where), padding=2)
        got = dict(zip(outputs, session.run(outputs, feeds | caches), strict=True))
        caches = {name: got[f"{name}.out"] for name in names}
    wanted = bench.executor.draft(batch)
    np.testing.assert_allclose(got["base_logits"][:4], wanted.base_logits, atol=1e-4)
    np.testing.assert_allclose(got["hidden"][:4], wanted.hidden, atol=1e-4)
    num_drafts = np.array([4, 4, 2, 4], np.int32)
    greedy = bench.executor.draft_greedy(batch, num_drafts=num_drafts)
    np.testing.assert_array_equal(got["num_tokens"], [4, 4, 2, 4, 0, 0])
    np.testing.assert_array_equal(greedy.num_tokens, num_drafts)
    for row, count in enumerate(num_drafts):
        np.testing.assert_array_equal(got["draft_tokens"][row, :count], greedy.tokens[row, :count])
        if greedy.confidence_logits is not None:
            np.testing.assert_allclose(
                got["confidence_logits"][row, :count], greedy.confidence_logits[row, :count], atol=1e-4
            )
        assert not got["draft_tokens"][row, count:].any()


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "none", "reduced"])
def test_sampled_blocks_are_those_of_the_plain_operation(kind: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "drafter", tiny_target_config(), **KINDS[kind])
    session, names = _session(bench, tmp_path)
    batch, _ = bench.batch([0] * 12)
    feeds = _feeds(batch, (bench.features(0), np.zeros(0, np.int32), np.zeros(0, np.int32)), padding=1)
    rng = np.random.default_rng(3)
    count = 13
    feeds |= {
        "num_drafts": rng.integers(0, 5, count).astype(np.int32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, count),
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], count).astype(np.float32),
        "top_k": rng.choice([0, 1, 7], count).astype(np.int32),
        "top_p": rng.choice([1.0, 0.9, 0.3], count).astype(np.float32),
        "min_p": rng.choice([0.0, 0.05], count).astype(np.float32),
        "coupled": rng.integers(0, 2, count).astype(np.int32),
    }
    caches = {name: np.zeros((8, 2, 2, 8), np.float32) for name in names}
    outputs = ["draft_tokens", "num_tokens", "draft_probs", "confidence_logits", "base_logits", "hidden"]
    tokens, num_tokens, probs, rated, base, hidden = session.run(outputs, feeds | caches)
    wanted = _plain(bench, feeds, base, hidden)
    np.testing.assert_array_equal(num_tokens, wanted.num_tokens.numpy())
    np.testing.assert_array_equal(tokens, wanted.tokens.numpy())
    np.testing.assert_allclose(rated, wanted.confidence_logits.numpy(), atol=1e-4)
    warm = feeds["temperature"] > 0
    assert warm.any() and feeds["coupled"][warm].any() and not feeds["coupled"][warm].all()
    np.testing.assert_allclose(probs[warm], wanted.draft_probs.numpy()[warm], atol=1e-5)


def _plain(bench: Bench, feeds: dict[str, Any], base: np.ndarray, hidden: np.ndarray) -> Any:
    """Run the plain operation over the drafter's own weights."""
    checkpoint, config = bench.checkpoint, bench.checkpoint.config
    w = {name: torch.from_numpy(checkpoint.weights.float32(name)) for name in checkpoint.weights.names()
         if name != "draft_to_target"}  # fmt: skip
    mix = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_head_type)
    confidence = w.get("confidence_head.proj.weight")
    order = ("num_drafts", "positions", "seeds", "temperature", "top_k", "top_p", "min_p", "coupled")
    given = feeds | {"positions": feeds["anchor_positions"] + 1}

    def index(array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array)

    return block_sample(
        torch.from_numpy(base),
        torch.from_numpy(hidden),
        torch.from_numpy(feeds["anchors"]),
        *(torch.from_numpy(given[name]) for name in order),
        w.get("markov_head.markov_w1.weight"),
        w.get("markov_head.markov_w2.weight"),
        w.get(f"markov_head.{mix}.weight"),
        w.get(f"markov_head.{mix}.bias"),
        None if confidence is None else confidence[0],
        w.get("confidence_head.proj.bias"),
        w.get("confidence_head.greedy.weight"),
        index(checkpoint.draft_to_target),
        index(checkpoint.previous_to_row),
    )


@pytest.mark.parametrize("vocab_size", [1, 7, 111, 999])
def test_a_row_that_is_not_finite_ends_its_block(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    base = rng.standard_normal((5, 3, vocab_size)).astype(np.float32) * 3
    base[1, 1, -1] = np.nan
    base[2, 0, 0] = np.inf
    base[3, 2] = -np.inf
    base[4, :, 1:] = -np.inf  # one token is left: no error
    one = np.ones(5, np.float32)
    feeds = {
        "base_logits": base,
        "hidden": np.zeros((5, 3, 4), np.float32),
        "anchors": np.zeros(5, np.int32),
        "num_drafts": np.full(5, 3, np.int32),
        "positions": np.arange(5, dtype=np.int32),
        "seeds": np.arange(5, dtype=np.int64) - 2,
        "temperature": one,
        "top_k": np.zeros(5, np.int32),
        "top_p": one,
        "min_p": 0 * one,
        "coupled": np.array([0, 1, 0, 1, 1], np.int32),
    }
    head = SampleHead(head=0, confidence=0, mapped=False, previous=False)
    outputs: dict[str, Any] = {
        "tokens": ("i32", ("R", 3)),
        "num_tokens": ("i32", ("R",)),
        "draft_probs": ("fp32", ("R", 3, vocab_size)),
        "confidence_logits": ("fp32", ("R", 3)),
    }
    flags = {"head": 0, "confidence": 0, "mapped": 0, "previous": 0}
    got = run_operation(block_sample_function(head), feeds, outputs, **flags)
    wanted = block_sample(*(torch.from_numpy(value) for value in feeds.values()), *[None] * 9)
    np.testing.assert_array_equal(wanted.num_tokens.numpy(), [3, 1, 0, 2, 3])
    for mine, plain in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, plain.numpy(), atol=1e-6)
