"""`dspark-build export`: what it leaves, when it does nothing, what it refuses, and how far 16 bits carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.executors.interface import StepBatch
from dspark.executors.tensorrt_bindings import Precision
from dspark.executors.tensorrt_manifest import check_files, check_pair, load_export
from dspark.executors.torch_target import TorchTarget
from dspark.models.loading import TargetCheckpoint, load_target
from dspark_build.cli import main
from support.tiny_drafters import write_good_drafter, write_tiny_drafter
from support.tiny_models import DictWeights, write_tiny_target

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from dspark_build.export import ExportJob, export_pair  # noqa: E402  (needs onnx)
from support.onnx_models import cpu_session, nothing_to_verify  # noqa: E402

FILES = {"target.onnx", "target.data", "drafter.onnx", "drafter.data", "export.json"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("export")
    write_tiny_target(home / "target")
    write_tiny_target(home / "other", seed=1)
    write_good_drafter(home / "drafter", home / "target")
    return home


def _export(home: Path, out: Path, *more: str) -> int:
    return main(
        [
            *("export", "--target", str(home / "target"), "--drafter", str(home / "drafter")),
            *("--out", str(out), "--page-size", "4", "--precision", "fp32", *more),
        ]
    )


def test_an_export_is_whole_and_done_once(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert _export(home, out) == 0
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    manifest = load_export(out)
    check_files(out, manifest, contents=True)
    assert (manifest.precision, manifest.page_size, manifest.block_size) == ("fp32", 4, 4)
    assert manifest.feature_layer_ids == (0, 1)
    assert manifest.target_hash == load_target(home / "target").config.model_hash
    assert {file.name for file in manifest.files} == FILES - {"export.json"}
    for name, bindings in (("target", manifest.target_bindings), ("drafter", manifest.drafter_bindings)):
        graph = onnx.load(out / f"{name}.onnx", load_external_data=False).graph
        assert [i.name for i in graph.input] == [
            b.name for b in bindings if b.kind in ("input", "cache", "link")
        ]
        weights = {tensor.name for tensor in graph.initializer}
        assert weights >= {b.name for b in bindings if b.kind == "weight"}
    # The drafter has no tables of its own: it points at the target's.
    graph = onnx.load(out / "drafter.onnx", load_external_data=False).graph
    where = {tensor.name: tensor.external_data[0].value for tensor in graph.initializer}
    assert where["embed_tokens"] == where["lm_head"] == "target.data"
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    assert _export(home, out) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert before == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    data = bytearray((out / "target.data").read_bytes())
    data[-1] ^= 1
    (out / "target.data").write_bytes(data)
    assert _export(home, out) == 0
    assert "nothing to do" not in capsys.readouterr().err
    check_files(out, manifest, contents=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--precision", "int8"), ("--precision", "int8", "fp32, fp16, bf16")),
        (("--page-size", "0"), ("--page-size", "got 0", "1 to 4096")),
        (("--page-size", "99999999999999999999"), ("--page-size", "got 9999", "1 to 4096")),
        (("--drafter", "ngram"), ("--drafter", "ngram", "none or the folder")),
        (("--target", "other"), ("target", "drafter")),
        (("--out", "a_file"), ("--out", "a_file", "must be a folder")),
        (("--out", "a_file/below"), ("--out", "a_file/below", "cannot be written")),
        (("--out", "strangers"), ("--out", "strangers", "something else")),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    options: tuple[str, str],
    words: tuple[str, ...],
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a_file").write_text("mine")
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "notes.txt").write_text("mine")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    name, value = options
    base = {"--target": home, "--out": tmp_path}.get(name)
    assert _export(home, tmp_path / "out", name, value if base is None else str(base / value)) == 2
    told = capsys.readouterr().err
    assert told.startswith("dspark-build export: ") and all(word in told for word in words), told
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def test_an_export_that_fails_half_way_leaves_the_earlier_one(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _export(home, out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    found = load_target(home / "target")
    weights = {name: found.weights.float32(name) for name in found.weights.names()}
    del weights["layers.2.mlp.down_proj.weight"]
    broken = TargetCheckpoint(found.config, DictWeights(weights), None)
    with pytest.raises(KeyError, match="down_proj"):
        export_pair(ExportJob(target=broken, drafter=None, precision="fp32", page_size=8), out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}


def test_an_export_for_something_else_is_refused(home: Path, tmp_path: Path) -> None:
    from dspark.errors import CheckpointError

    assert _export(home, tmp_path / "out") == 0
    manifest = load_export(tmp_path / "out")
    right: dict[str, Any] = {
        "target_hash": manifest.target_hash,
        "drafter_hash": manifest.drafter_hash,
        "page_size": 4,
        "target_bindings": manifest.target_bindings,
        "drafter_bindings": manifest.drafter_bindings,
    }
    check_pair(manifest, **right)
    wrong = {
        "target_hash": "f00",
        "drafter_hash": "ba5",
        "page_size": 16,
        "target_bindings": manifest.target_bindings[1:],
        "drafter_bindings": manifest.drafter_bindings[:-1],
    }
    for field, value in wrong.items():
        with pytest.raises(CheckpointError, match=field):
            check_pair(manifest, **right | {field: value})
    (tmp_path / "out" / "target.data").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"target.data: must have \d+ bytes, has 3"):
        check_files(tmp_path / "out", manifest)


def _batch() -> StepBatch:
    """Return a prefill of seven and of four rows."""
    rng = np.random.default_rng(1)
    positions = np.concatenate([np.arange(7), np.arange(4)]).astype(np.int32)
    return StepBatch(
        tokens=rng.integers(0, 50, 11).astype(np.int32),
        positions=positions,
        query_start=np.array([0, 7, 11], np.int32),
        context_len=np.zeros(2, np.int32),
        page_table=np.array([[0, 1], [2, -1]], np.int32),
        slots=np.concatenate([np.arange(7), 8 + np.arange(4)]).astype(np.int32),
        logit_rows=np.arange(11, dtype=np.int32),
    )


# ONNX Runtime's CPU has no products in bf16; ONNX's own evaluator has, and needs no more than a tiny model.
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_sixteen_bits_stay_near_the_torch_executor(
    precision: Precision, dtype: Any, home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert _export(home, out, "--precision", precision) == 0
    found, batch = load_target(home / "target"), _batch()
    names = [f"kv_cache.{i}" for i in range(found.config.decoder.num_layers)]
    feeds = {
        name: getattr(batch, name)
        for name in (
            *("tokens", "positions", "query_start", "context_len", "page_table", "slots", "logit_rows"),
        )
    }
    feeds |= {"ancestors": np.zeros((11, 0), np.int32)}
    feeds |= {name: np.zeros((16, 2, 2, 8), dtype) for name in names}
    feeds |= nothing_to_verify(
        load_export(out).target_bindings, num_sequences=2, num_rows=len(batch.logit_rows)
    )
    got = _run(out / "target.onnx", feeds, precision)
    torch_dtype = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    target = TorchTarget(found.config, found.weights, dtype=torch_dtype)
    target.allocate_cache(num_pages=4, page_size=4)
    wanted = target.forward(batch).logits
    # Logits spread over 3; one rounding is 2**-11 or 2**-8 of a value, a pass has about ten in a row.
    tolerance = {"fp16": 0.03, "bf16": 0.25}[precision]
    assert np.abs(got - wanted).max() < tolerance
    exact = TorchTarget(found.config, found.weights, dtype="float32")
    exact.allocate_cache(num_pages=4, page_size=4)
    assert np.abs(got - exact.forward(batch).logits).max() < tolerance


def _run(path: Path, feeds: dict[str, Any], precision: str) -> np.ndarray:
    """Return the logits of a target."""
    if precision == "bf16":
        from onnx.reference import ReferenceEvaluator

        return np.asarray(ReferenceEvaluator(onnx.load(path)).run(["logits"], feeds)[0])
    session = cpu_session(str(path))
    return np.asarray(session.run(["logits"], feeds)[0])


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_a_drafter_in_sixteen_bits_drafts_as_in_thirty_two(head: Any, home: Path, tmp_path: Path) -> None:
    write_tiny_drafter(tmp_path / "drafter", home / "target", head=head, draft_vocab=20)
    found = load_target(home / "target")
    checkpoint = load_drafter_checkpoint(tmp_path / "drafter", target=found.config)
    rated = {}
    for precision in ("fp32", "fp16"):
        out = tmp_path / precision
        assert _export(home, out, "--drafter", str(tmp_path / "drafter"), "--precision", precision) == 0
        session = cpu_session(str(out / "drafter.onnx"))
        dtype = np.float16 if precision == "fp16" else np.float32
        rows = np.arange(6, dtype=np.int32)
        whole, real = np.zeros(1, np.int32), np.ones(1, np.float32)
        feeds = {
            "features": np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32),
            "new_positions": rows,
            "new_slots": rows,
            "anchors": whole + 3,
            "anchor_positions": whole + 6,
            "context_len": whole + 6,
            "page_table": np.arange(2, dtype=np.int32)[None],
            "num_drafts": whole + checkpoint.config.block_size,
            "seeds": whole.astype(np.int64),
            "temperature": real,
            "top_k": whole,
            "top_p": real,
            "min_p": 0 * real,
            "coupled": whole + 1,
        }
        caches = {f"kv_cache.{i}": np.zeros((8, 2, 2, 8), dtype) for i in range(2)}
        outputs = ["draft_tokens", "base_logits", "hidden", "confidence_logits"]
        rated[precision] = session.run(outputs, feeds | caches)
    np.testing.assert_array_equal(rated["fp16"][0], rated["fp32"][0])
    for mine, exact in zip(rated["fp16"][1:], rated["fp32"][1:], strict=True):
        np.testing.assert_allclose(mine, exact, atol=0.03)
