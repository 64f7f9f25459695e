"""The exported target on ONNX Runtime equals the torch executor on ragged batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dspark.executors.interface import StepBatch
from dspark.executors.torch_target import TorchTarget
from support.tiny_models import DictWeights, random_weights, tiny_config

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from support.onnx_models import cpu_session  # noqa: E402  (needs onnx)

PAGE, PAGES = 4, 24
ROWS, CONTEXT = (9, 1, 4), (0, 0, 0)  # first pass; prefill, one row, prefill
NEXT = (1, 5, 3)  # second pass: a decoding row, a chunk, drafts to verify


def _batch(rows: tuple[int, ...], context: tuple[int, ...], *, tree: bool) -> StepBatch:
    rng = np.random.default_rng(sum(rows))
    table = np.random.default_rng(0).permutation(PAGES).astype(np.int32).reshape(3, -1)
    owner = np.repeat(np.arange(3), rows)
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    at = np.arange(len(owner)) - start[owner]
    positions = (at + np.array(context)[owner]).astype(np.int32)
    slots = table[owner, positions // PAGE] * PAGE + positions % PAGE
    # A tree: every row sees the first of its sequence and itself.
    ancestors = (np.ones(len(at), np.int32) | (1 << at)).astype(np.int32)[:, None] if tree else None
    return StepBatch(
        tokens=rng.integers(0, 50, len(owner)).astype(np.int32),
        positions=positions,
        query_start=start,
        context_len=np.array(context, np.int32),
        page_table=table,
        slots=slots.astype(np.int32),
        logit_rows=np.arange(0, len(owner), 2, dtype=np.int32),
        ancestors=ancestors,
    )


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_graph_equals_the_torch_executor(architecture: str, tree: bool, tmp_path: Path) -> None:
    from dspark_build.export_target import target_model
    from dspark_build.export_weights import WeightFile

    config = tiny_config(architecture=architecture, tie=architecture == "llama")
    weights = DictWeights(random_weights(config))
    with (tmp_path / "t.data").open("wb") as stream:
        model = target_model(
            config,
            weights,
            WeightFile(stream, "t.data"),
            precision="fp32",
            page_size=PAGE,
            feature_layer_ids=(-1, 1),
        )
    onnx.save(model, tmp_path / "t.onnx")
    onnx.checker.check_model(str(tmp_path / "t.onnx"), full_check=True)
    session = cpu_session(str(tmp_path / "t.onnx"))
    torch_target = TorchTarget(config, weights, dtype="float32", feature_layer_ids=(-1, 1))
    torch_target.allocate_cache(num_pages=PAGES, page_size=PAGE)
    names = [f"kv_cache.{i}" for i in range(config.decoder.num_layers)]
    caches = {name: np.full((PAGES * PAGE, 2, 2, 8), np.nan, np.float32) for name in names}
    for batch in (_batch(ROWS, CONTEXT, tree=False), _batch(NEXT, ROWS, tree=tree)):
        wanted = torch_target.forward(batch)
        num_rows = len(batch.tokens)
        masks = np.zeros((num_rows, 0), np.int32) if batch.ancestors is None else batch.ancestors
        feeds = {
            name: getattr(batch, name) for name in ("query_start", "context_len", "page_table", "logit_rows")
        }
        # Two rows of padding, which must write nothing.
        for name in ("tokens", "positions", "slots"):
            feeds[name] = np.concatenate([getattr(batch, name), np.zeros(2, np.int32)])
        feeds["ancestors"] = np.concatenate([masks, np.zeros((2, masks.shape[1]), np.int32)])
        outputs = ["logits", "argmax", "finite", "features", *(f"{name}.out" for name in names)]
        got = dict(zip(outputs, session.run(outputs, feeds | caches), strict=True))
        np.testing.assert_allclose(got["logits"], wanted.logits, atol=1e-4)
        np.testing.assert_array_equal(got["argmax"], wanted.argmax)
        assert got["finite"].all() and wanted.finite.all()
        assert wanted.features is not None
        np.testing.assert_allclose(got["features"][:num_rows], wanted.features, atol=1e-4)
        caches = {name: got[f"{name}.out"] for name in names}
