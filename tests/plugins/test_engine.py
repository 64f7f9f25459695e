"""`dspark-build engine`: what it leaves, when it does nothing, what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.errors import CheckpointError, ConfigError, EngineError
from dspark.executors.tensorrt_bindings import Binding
from dspark.executors.tensorrt_buckets import drafter_buckets, target_buckets
from dspark.executors.tensorrt_loading import checked_export, engine_shapes
from dspark.models.loading import load_target
from dspark_build.cli import main
from dspark_build.engine_profiles import EngineLimits, profile_shapes, profiles_of
from dspark_build.engine_report import layers_of, missing_plugins, report_text
from dspark_build.folder_lock import locked_folder
from dspark_plugins.tensorrt.module import INSTALL, tensorrt_name
from support.tiny_drafters import write_tiny_drafter
from support.tiny_models import write_tiny_target

if tensorrt_name() is None:
    pytest.skip(f"TensorRT is not installed: {INSTALL}", allow_module_level=True)
if tensorrt_name() == "tensorrt":
    pytest.skip("this TensorRT builds for the GPU at hand alone", allow_module_level=True)
onnx = pytest.importorskip("onnx", reason="onnx is not installed")

from dspark_build.engine_manifest import load_engine_manifest, whole_engine  # noqa: E402

FILES = {
    *("target.plan", "target.layers.md", "drafter.plan", "drafter.layers.md"),
    *("engine.json", "export.json", "embed_tokens.table"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("engine")
    write_tiny_target(home / "target", tie=True)
    write_tiny_drafter(home / "drafter", home / "target", rank=8)
    shutil.copytree(home / "drafter", home / "foreign")
    raw = json.loads((home / "foreign" / "config.json").read_text())
    (home / "foreign" / "config.json").write_text(json.dumps(raw | {"target_hash": "0123"}))
    assert engine(home, home / "built") == 0
    return home


def engine(home: Path, out: Path, **options: str) -> int:
    return main(words_of(home, out, **options))


def words_of(home: Path, out: Path, **options: str) -> list[str]:
    given = {
        "target": str(home / "target"),
        "drafter": str(home / "drafter"),
        "sm": "89",
        "out": str(out),
        "precision": "fp16",
        "max-batch": "3",
        "max-tokens": "32",
        "max-pages": "8",
        "page-size": "4",
    } | options
    return ["engine", *(word for name, value in given.items() for word in (f"--{name}", value))]


def test_an_engine_is_whole_and_every_node_of_ours_a_plugin(home: Path) -> None:
    built = home / "built"
    assert {path.name for path in built.iterdir()} == FILES
    manifest = whole_engine(built)
    target, drafter = manifest.plans
    assert target.spills == drafter.spills == {}
    layers = load_target(home / "target").config.decoder.num_layers
    assert target.num_plugins == layers + 2  # verify, and schedule
    assert target.kinds["PluginV3"] + target.kinds.get("custom_layer", 0) == 2 * (layers + 2)
    assert drafter.num_plugins == 2 + 1
    assert drafter.kinds["PluginV3"] + drafter.kinds.get("custom_layer", 0) == 2 * 3
    # Chains and trees, at tiles of 16 and 32 rows whole and in pieces, of 64 whole.
    assert target.kernels == {
        "attention_kernel": 10,
        "chain_weights_kernel": 1,
        "merge_splits_kernel": 1,
        "row_limits_kernel": 1,
        "schedule_kernel": 1,
        "walk_kernel": 1,  # verification
    }
    assert set(drafter.kernels) == {
        *("attention_kernel", "write_rows_kernel", "merge_splits_kernel", "block_sample_kernel")
    }
    assert (manifest.sm, manifest.precision, manifest.block_size) == (89, "fp16", 4)
    assert [binding["name"] for binding in target.bindings][:2] == ["tokens", "positions"]
    page = (built / "target.layers.md").read_text()
    assert page.count("| PluginV3 |") + page.count("| custom_layer |") == 2 * (layers + 2)
    assert "Profile 1: prompts" in page


def test_the_runtime_takes_the_folder_and_refuses_a_cut_plan(home: Path, tmp_path: Path) -> None:
    target = load_target(home / "target").config
    drafter = load_drafter_checkpoint(home / "drafter", target=target)
    cut = tmp_path / "cut"
    cut.mkdir()
    for path in (home / "built").iterdir():
        (cut / path.name).write_bytes(path.read_bytes())
    assert checked_export(cut, target=target, drafter=drafter, page_size=4).precision == "fp16"
    data = (cut / "target.plan").read_bytes()
    (cut / "target.plan").write_bytes(data[:100])
    with pytest.raises(CheckpointError, match=f"target.plan: must have {len(data)} bytes, has 100"):
        checked_export(cut, target=target, drafter=drafter, page_size=4)
    with pytest.raises(
        CheckpointError, match=f"must have {len(data)} bytes, has 100 bytes; build the engine again"
    ):
        whole_engine(cut)
    (cut / "target.plan").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="sha256 must be"):
        whole_engine(cut)
    (cut / "target.plan").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        whole_engine(cut)


def test_every_plugin_of_a_plan_carries_its_kernels(home: Path) -> None:
    for plan in whole_engine(home / "built").plans:
        data = (home / "built" / plan.file.name).read_bytes()
        assert data.count(b"kernel_table") == data.count(b"cubins") >= 2 * plan.num_plugins  # in each profile


def test_a_tied_table_lies_beside_the_plans_once(home: Path) -> None:
    table = load_target(home / "target").weights.float32("embed_tokens.weight").astype(np.float16)
    assert (home / "built" / "embed_tokens.table").read_bytes() == table.T.tobytes()
    assert [one.shape for one in whole_engine(home / "built").tables] == [table.T.shape]
    for name in ("target", "drafter"):
        data = (home / "built" / f"{name}.plan").read_bytes()
        assert (data.count(table.tobytes()), data.count(table.T.tobytes())) == (0, 0), name


def test_a_folder_without_the_manifest_of_its_runtime_is_not_whole(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "built", tmp_path / "built")
    path = tmp_path / "built" / "export.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"files": raw["files"][:1]}))
    with pytest.raises(CheckpointError, match="export.json: is not of these plans; build the engine again"):
        whole_engine(tmp_path / "built")
    path.unlink()
    with pytest.raises(CheckpointError, match="export.json"):
        whole_engine(tmp_path / "built")


def test_a_build_that_is_killed_leaves_nothing_that_serves_nor_stays(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(home / "built", out)
    started = subprocess.Popen(
        [sys.executable, "-m", "dspark_build.cli", *words_of(home, out, **{"max-batch": "2"})],
        stderr=subprocess.DEVNULL,
    )
    while (out / "engine.json").exists() and started.poll() is None:
        time.sleep(0.01)
    started.kill()
    started.wait()
    assert list(out.glob(".onnx-*")), "it was not killed at work"
    assert not (out / "engine.json").exists() and not (out / "export.json").exists()
    assert engine(home, out, drafter="none") == 0
    alone = {"target.plan", "target.layers.md", "engine.json", "export.json"}
    assert {
        path.name for path in out.iterdir()
    } == alone  # of the build before nothing, and no table to share
    table = load_target(home / "target").weights.float32("embed_tokens.weight").astype(np.float16)
    assert (out / "target.plan").read_bytes().count(table.tobytes()) == 1
    whole_engine(out)


def test_a_folder_that_is_built_in_already_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked_folder(home / "built"):
        assert engine(home, home / "built") == 2
    assert "--out: another build is at work in" in capsys.readouterr().err


@pytest.mark.parametrize("onnx", ["out", "."])
def test_graphs_do_not_replace_the_plans(
    onnx: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine(home, tmp_path / "out", onnx=str(tmp_path / onnx)) == 2
    assert "--onnx: that folder is replaced as a whole, so --out must not be in it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (90, "--sm: got 89, but .* allowed is 90"),
        (None, "for the GPU at hand alone, and there is none"),
        (89, ""),
    ],
)
def test_a_tensorrt_for_the_gpu_at_hand_builds_for_no_other(
    found: int | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark_build import engine_plan

    monkeypatch.setattr(engine_plan, "known_architectures", list)
    monkeypatch.setattr(engine_plan.DriverLauncher, "capability", lambda _: found)
    if not told:
        engine_plan.check_architecture(89, "bf16")
        return
    with pytest.raises(ConfigError, match=told):
        engine_plan.check_architecture(89, "bf16")


def test_kernels_that_spill_are_told(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dspark_build import engine_kernels

    compiled = engine_kernels.build_kernels

    def spilling(*args: Any, **more: Any) -> Any:
        return [
            replace(e, spill_bytes=8) if e.kernel == "walk_kernel" else e for e in compiled(*args, **more)
        ]

    monkeypatch.setattr(engine_kernels, "build_kernels", spilling)
    assert engine(home, tmp_path / "out", drafter="none") == 0
    (plan,) = whole_engine(tmp_path / "out").plans
    assert [(key.split(",")[0], count) for key, count in plan.spills.items()] == [("walk_kernel", 8)]
    told = capsys.readouterr().err
    assert "target: spills 8 bytes a thread: walk_kernel," in told and "1 kernels spill" in told


def test_unchanged_inputs_are_nothing_to_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (home / "built").iterdir()}
    capsys.readouterr()
    assert engine(home, home / "built") == 0
    assert "nothing to do" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (home / "built").iterdir()} == before


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("sm", "blackwell", "--sm: got 'blackwell', allowed is one of 80, 86"),
        ("sm", "90", "cannot build for; allowed are 80, 86, 89, 120\n"),
        ("sm", "75", "--sm: got 75, for which there are no kernels"),
        ("precision", "fp8", "--precision: got 'fp8', allowed are fp32, fp16, bf16"),
        ("max-batch", "0", "--max-batch: got 0, allowed is 1 or more"),
        ("page-size", "1000000000000", "--page-size: got 1000000000000, allowed is 1 to 4096"),
        ("max-pages", "99999999", "--max-batch, --max-pages: kv_cache.0 would have"),
        ("drafter", "foreign", "target_hash: the drafter was made for 0123"),
        ("drafter", "nowhere", "--drafter: must be none or the folder of a checkpoint, got"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_left(
    option: str, value: str, told: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if option == "drafter":
        value = str(home / value)
    assert engine(home, tmp_path / "out", **{option: value}) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.*"))


def test_a_precision_that_the_chip_lacks(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine(home, tmp_path / "out", sm="75", precision="bf16") == 2
    assert "--precision: got 'bf16', which sm 75 does not have" in capsys.readouterr().err


def test_a_file_in_the_way(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert engine(home, tmp_path / "out") == 2
    assert "--out: must be a folder" in capsys.readouterr().err


def test_a_missing_tensorrt_says_how_to_install_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dspark_build.engine.tensorrt_name", lambda: None)
    assert engine(home, tmp_path / "out") == 2
    assert "building engines needs TensorRT: pip install tensorrt-rtx" in capsys.readouterr().err


def test_an_engine_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dspark-build engine"):
        load_engine_manifest(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({"format_version": 9}))
    with pytest.raises(CheckpointError, match="format_version must be 4, got 9"):
        load_engine_manifest(tmp_path)
    (tmp_path / "engine.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_engine_manifest(tmp_path)


def test_a_graph_that_a_plugin_refuses_is_told_in_the_plugins_words(tmp_path: Path) -> None:
    from dspark_build.engine_kernels import KernelCompiler
    from dspark_build.engine_plan import build_plan

    kinds = {"fp16": onnx.TensorProto.FLOAT16, "fp32": onnx.TensorProto.FLOAT, "i32": onnx.TensorProto.INT32}
    bindings = [
        *(
            Binding("q", "fp16", ("T", 5, 8)),
            Binding("k", "fp16", ("T", 2, 8)),
            Binding("v", "fp16", ("T", 2, 8)),
        ),
        *(Binding("cache", "fp16", ("S", 2, 2, 8), "cache"), Binding("cos", "fp32", ("T", 4))),
        *(Binding("sin", "fp32", ("T", 4)), Binding("table", "i32", ("R", "P"))),
        *(
            Binding("start", "i32", ("R+1",)),
            Binding("context", "i32", ("R",)),
            Binding("slots", "i32", ("T",)),
        ),
        *(Binding("at", "i32", ("T",)), Binding("masks", "i32", ("T", "W"))),
    ]
    node = onnx.helper.make_node(
        "DSparkPagedAttention", [b.name for b in bindings], ["out", "cache.out"], domain="dspark", name="out",
        plugin_namespace="dspark", plugin_version="1", page_size=4, scale=1.0, window=0,
    )  # fmt: skip
    values = {b.name: onnx.helper.make_tensor_value_info(b.name, kinds[b.dtype], b.shape) for b in bindings}
    made = [
        onnx.helper.make_tensor_value_info("out", kinds["fp16"], ["T", 5, 8]),
        onnx.helper.make_tensor_value_info("cache.out", kinds["fp16"], ["S", 2, 2, 8]),
    ]
    graph = onnx.helper.make_graph([node], "g", list(values.values()), made)
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("dspark", 1)]
    )
    limits = EngineLimits(max_batch=2, max_tokens=8, max_pages=4, page_size=4, block_size=3)
    with pytest.raises(EngineError, match="ValueError: DSparkPagedAttention: 2 key heads must divide 5"):
        build_plan(
            tmp_path / "bad.onnx", model, bindings, profiles_of(limits), KernelCompiler(89, num_jobs=1)
        )


@pytest.mark.parametrize(("batch", "tokens", "block"), [(1, 1, 1), (3, 100, 4), (16, 2048, 7), (64, 512, 15)])
def test_every_call_that_the_runtime_prepares_is_within_a_profile(
    batch: int, tokens: int, block: int
) -> None:
    limits = EngineLimits(max_batch=batch, max_tokens=tokens, max_pages=33, page_size=16, block_size=block)
    shapes = engine_shapes(
        max_sequences=batch,
        max_step_tokens=tokens,
        max_context_len=32 * 16 - block,
        page_size=16,
        block_size=block,
    )
    decode, prompts = profiles_of(limits)
    assert prompts.sizes["S"][2] >= batch * 33 * 16
    for sizes in [*target_buckets(shapes), *drafter_buckets(shapes, block), shapes.largest()]:
        assert all(prompts.sizes[name][0] <= n <= prompts.sizes[name][2] for name, n in sizes.items()), sizes
    steps = [s for s in target_buckets(shapes) if s["T"] <= batch * (1 + block)]
    assert steps
    for sizes in steps:
        assert all(decode.sizes[name][0] <= n <= decode.sizes[name][2] for name, n in sizes.items()), sizes


def test_a_tensor_that_is_too_large_is_named() -> None:
    limits = EngineLimits(max_batch=1024, max_tokens=8, max_pages=4096, page_size=16, block_size=7)
    cache = Binding("kv_cache.0", "bf16", ("S", 2, 8, 128), "cache")
    with pytest.raises(ConfigError, match="kv_cache.0 would have 137"):
        profile_shapes([cache], profiles_of(limits)[0])


LOG = """Layers:
Name: {ForeignNode}, LayerType: NoOp, Inputs: []
Name: gemm_1_myl0, LayerType: gemm, Inputs: [], TacticName: sm89_gemm, Metadata: [ONNX Layer: a][ONNX Layer: b]
Name: attended_2, LayerType: PluginV3, Inputs: []
Name: tokens_U3_myl1_10, LayerType: custom_layer, Inputs: []
Name: attended_2 [profile 1], LayerType: PluginV3, Inputs: []
Name: gemm_1_myl2, LayerType: gemm, Inputs: [], TacticName: sm89_gemm, StreamId: 0, Metadata: [ONNX Layer: a]"""


def test_the_log_tells_layers_and_what_became_of_plugins() -> None:
    layers = layers_of(["Engine built", LOG])
    assert [layer.profile for layer in layers] == [0, 0, 0, 0, 1, 1]
    assert layers[1].tactic == "sm89_gemm" and layers[1].origins == ("a", "b")
    assert missing_plugins(layers, ["attended_2"], num_profiles=2) == []
    assert missing_plugins(layers, ["tokens"], num_profiles=1) == []
    assert missing_plugins(layers, ["attended_2", "tokens", "attended"], num_profiles=2) == [
        "tokens",
        "attended",
    ]
    assert "1 PluginV3, 1 gemm" in report_text("Layers", layers, ["decode", "prompts"])
