"""`CudaSession` on a device in this process's memory: tables shared, calls captured and replayed, failures named."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.errors import CapacityError, CheckpointError, ConfigError, EngineError
from dspark.executors import tensorrt_cuda, tensorrt_device
from dspark.executors.interface import DraftBatch, StepBatch
from dspark.executors.tensorrt_device import CudaDevice, SharedTables, device_pair_memory
from dspark.executors.tensorrt_loading import EnginePair, engine_shapes, load_engine_pair
from dspark.executors.tensorrt_manifest import ExportedFile
from dspark.models.loading import load_target
from support.engines import make_request, run
from support.steady_lagged import SteadyLagged, assert_equal_steps, bent_calibrator, steady
from support.step_batches import ragged_step
from support.tiny_drafters import write_tiny_drafter
from support.tiny_models import write_tiny_target

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from dspark_build.engine_tables import (  # noqa: E402
    load_graphs,
    shared_tables_of,
    with_table_inputs,
    write_table,
)
from dspark_build.export import ExportJob, export_pair  # noqa: E402
from support.fake_cuda import CudaError, FakeCuda, FakeTensorRT, write_fake_plan  # noqa: E402

PAGE = 4
SHAPES = engine_shapes(max_sequences=2, max_step_tokens=6, max_context_len=32, page_size=PAGE, block_size=4)
SHAPES = replace(SHAPES, graph_tokens=4)


class Home:
    """Checkpoints, their export, and an engine folder whose plans are graphs that take shared tables."""

    def __init__(self, folder: Path, *, tie: bool) -> None:
        write_tiny_target(folder / "target", max_context_len=64, tie=tie)
        write_tiny_drafter(folder / "drafter", folder / "target", rank=8)
        self.target = load_target(folder / "target")
        self.drafter = load_drafter_checkpoint(folder / "drafter", target=self.target.config)
        self.graphs, self.folder = folder / "onnx", folder / "engine"
        job = ExportJob(target=self.target, drafter=self.drafter, precision="fp32", page_size=PAGE)
        self.export = export_pair(job, self.graphs)
        self.build()

    def build(self) -> None:
        """Do what `dspark-build engine` does, plans aside."""
        self.folder.mkdir()
        models = load_graphs(self.graphs, ("target", "drafter"))
        self.tables = shared_tables_of(self.export.drafter_bindings, models.values())
        tensors = {tensor.name: tensor for tensor in models["target"].graph.initializer}
        files = [
            write_table(table, tensors[table.binding.name], self.graphs, self.folder) for table in self.tables
        ]
        for name, model in models.items():
            onnx.save(with_table_inputs(model, self.tables), str(self.graphs / f"{name}.shared.onnx"))
            write_fake_plan(self.folder / f"{name}.plan", self.graphs / f"{name}.shared.onnx")
            files.append(told_of(self.folder / f"{name}.plan"))
        (self.folder / "export.json").write_text(replace(self.export, files=tuple(files)).text())
        limits = {"max_batch": 2, "max_tokens": 6, "max_pages": 10, "block_size": 4}
        told = {"format_version": 4, "limits": limits, "sm": 89, "tools": {"tensorrt": "tensorrt_rtx 1.7"}}
        (self.folder / "engine.json").write_text(json.dumps(told))

    def pair(self, folder: Path | None = None, backend: Any = "tensorrt") -> EnginePair:
        return load_engine_pair(
            folder or (self.folder if backend == "tensorrt" else self.graphs),
            target=self.target,
            drafter=self.drafter,
            page_size=PAGE,
            shapes=SHAPES,
            backend=backend,
            num_threads=1,
        )


def told_of(path: Path) -> ExportedFile:
    data = path.read_bytes()
    return ExportedFile(name=path.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return on_a_device(monkeypatch)


def on_a_device(monkeypatch: pytest.MonkeyPatch, *, capability: int = 89, **trt: Any) -> FakeCuda:
    """Put a device where there is none."""
    cuda = FakeCuda(capability)
    module = FakeTensorRT(cuda, **trt)
    creators = [SimpleNamespace(tools=SimpleNamespace(failures=[]))]
    monkeypatch.setattr(tensorrt_device, "_cuda_runtime", lambda _: cuda)
    monkeypatch.setattr(tensorrt_cuda, "_tensorrt", lambda: (module, creators))
    return cuda


def ragged(rng: np.random.Generator, rows: list[int], context: list[int]) -> StepBatch:
    return ragged_step(rng, rows, context, page_size=PAGE)


@pytest.mark.parametrize("tie", [True, False])
def test_plans_that_share_tables_equal_graphs_that_hold_them(
    tie: bool, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = on_a_device(monkeypatch)
    made = home if tie else Home(tmp_path, tie=False)
    layouts = {table.binding.name: table.transposed for table in made.tables}
    assert layouts == ({"embed_tokens": True} if tie else {"embed_tokens": False, "lm_head": True})
    pairs = [made.pair(), made.pair(backend="onnxruntime")]
    for pair in pairs:
        for part in (pair.target, pair.drafter):
            assert part is not None
            part.allocate_cache(num_pages=12, page_size=PAGE)
    rng, context = np.random.default_rng(0), [0, 0]
    for rows in ([5, 2], [1, 1], [3, 1], [1, 3], [1, 5]):
        batch = ragged(rng, rows, context)
        mine, theirs = (pair.target.forward(batch) for pair in pairs)
        np.testing.assert_allclose(mine.logits, theirs.logits, atol=1e-5)
        np.testing.assert_allclose(mine.features, theirs.features, atol=1e-5)
        context = [have + more for have, more in zip(context, rows, strict=True)]
        assert not cuda.waiting
    assert cuda.log.count("cudaGraphLaunch") == 3  # those of up to four rows


@pytest.mark.usefixtures("cuda")
def test_drafts_over_shared_tables_equal_those_of_graphs(home: Home) -> None:
    rng, found = np.random.default_rng(1), []
    features = rng.standard_normal((5, home.target.config.decoder.hidden_size * 2)).astype(np.float32)
    at = np.arange(5, dtype=np.int32)
    batch = DraftBatch(
        anchors=np.array([4], np.int32),
        anchor_positions=np.array([5], np.int32),
        context_len=np.array([5], np.int32),
        page_table=np.array([[0, 1]], np.int32),
    )
    for backend in ("tensorrt", "onnxruntime"):
        drafter = home.pair(backend=backend).drafter
        assert drafter is not None
        drafter.allocate_cache(num_pages=4, page_size=PAGE)
        executor: Any = drafter.executor
        executor.append_context(features=features, positions=at, slots=at)
        found.append(
            (executor.draft(batch), executor.draft_greedy(batch, num_drafts=np.array([4], np.int32)))
        )
    np.testing.assert_allclose(found[0][0].base_logits, found[1][0].base_logits, atol=1e-5)
    np.testing.assert_array_equal(found[0][1].tokens, found[1][1].tokens)


def test_a_table_is_on_the_device_once(home: Home, cuda: FakeCuda) -> None:
    pair = home.pair()
    table = home.target.weights.float32("embed_tokens.weight").T.tobytes()
    for part in (pair.target, pair.drafter):
        assert part is not None
        part.allocate_cache(num_pages=4, page_size=PAGE)
    assert sum(table in bytes(block) for block in cuda.memory.values()) == 1


def test_every_prepared_shape_has_a_context_of_its_own_and_the_same_scratch_memory(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = on_a_device(monkeypatch)
    trt = tensorrt_cuda._tensorrt()[0]
    target = home.pair().target
    target.allocate_cache(num_pages=4, page_size=PAGE)
    num_shapes = 3 + 2  # one sequence at 1, 2, 4 rows; two at 2, 4
    num_prepared = (
        3 * num_shapes
    )  # with logits, verified, and laid out by the device, which are shapes of their own
    assert cuda.log.count("cudaGraphInstantiate") == num_prepared
    assert len(trt.contexts) == 2 + 2 * num_shapes  # and one for each profile
    assert len({context.scratch for context in trt.contexts}) == 1
    target._runner.session.close()
    assert (
        len(cuda.memory) == 1 + 4
    )  # the table and what the drafter leaves for the target are not the session's
    assert cuda.log.count("cudaGraphExecDestroy") == num_prepared


def test_an_engine_that_cannot_be_captured_runs_without_graphs(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = on_a_device(monkeypatch, capturable=False)
    pairs = [home.pair(), home.pair(backend="onnxruntime")]
    outputs = []
    for pair in pairs:
        pair.target.allocate_cache(num_pages=12, page_size=PAGE)
        outputs.append(pair.target.forward(ragged(np.random.default_rng(3), [1, 2], [0, 0])).logits)
    np.testing.assert_allclose(*outputs, atol=1e-5)
    assert "cudaGraphLaunch" not in cuda.log


@pytest.mark.parametrize("capturable", [True, False])
def test_a_scheduled_step_is_started_as_a_whole_before_anybody_waits(
    capturable: bool, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = on_a_device(monkeypatch, capturable=capturable)
    limits = EngineLimits(
        max_batch_size=2, max_context_len=32, max_step_tokens=6, num_pages=18, page_size=PAGE
    )
    found, num_started = [], 0
    for backend, schedules in (("tensorrt", True), ("onnxruntime", False)):
        target, drafter = home.pair(backend=backend)
        assert drafter is not None
        executor: Any = drafter.executor
        target.schedules = schedules
        for part in (target, drafter):
            part.allocate_cache(num_pages=limits.num_pages, page_size=PAGE)
        if schedules:
            launch, collect = executor.launch, target.collect_scheduled

            def started(*given: Any, launch: Any = launch, **named: Any) -> None:
                cuda.log.clear()
                launch(*given, **named)

            def collected(collect: Any = collect) -> Any:
                nonlocal num_started
                num_started += 1
                assert cuda.waiting and "cudaStreamSynchronize" not in cuda.log
                assert cuda.log.count("cudaEventRecord") == 4  # around either call
                done = collect()
                assert not cuda.waiting
                return done

            executor.launch, target.collect_scheduled = started, collected  # type: ignore[method-assign]
        scheduler = SteadyLagged(block_size=4, calibrator=bent_calibrator(4))
        engine = steady(Engine(target=target, drafter=drafter, scheduler=scheduler, limits=limits))
        requests = [
            make_request([4, 2], max_tokens=20),
            make_request([7], max_tokens=14, temperature=0.8, seed=3),
        ]
        found.append(([one.token_ids for one in run(engine, requests)], scheduler.seen))
    assert num_started > 3
    (mine, seen), (theirs, expected) = found
    assert mine == theirs
    assert_equal_steps(seen, expected)


# What is refused, and in which words


def test_a_plan_for_another_gpu_names_both(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch, capability=120)
    with pytest.raises(
        CheckpointError, match=r"sm: the engine was built for 89, this GPU is 120; .* --sm 120"
    ):
        home.pair()


@pytest.mark.usefixtures("cuda")
def test_a_plan_that_was_cut_or_changed_says_so(home: Home, tmp_path: Path) -> None:
    shutil.copytree(home.folder, tmp_path / "engine")
    path = tmp_path / "engine" / "target.plan"
    data = path.read_bytes()
    path.write_bytes(data[:5])
    with pytest.raises(
        CheckpointError, match=f"must have {len(data)} bytes, has 5 bytes; build the engine again"
    ):
        home.pair(tmp_path / "engine")
    for name, changed in (("target.plan", data[:-1] + b"?"), ("embed_tokens.table", b"")):
        path.write_bytes(data)
        one = tmp_path / "engine" / name
        one.write_bytes(changed or one.read_bytes()[:-1] + b"?")  # as long as it was
        with pytest.raises(
            CheckpointError, match=rf"{name}: sha256 must be .*, got .*; build the engine again"
        ):
            home.pair(tmp_path / "engine")


@pytest.mark.usefixtures("cuda")
def test_a_plan_that_tensorrt_does_not_take_names_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "target.plan"
    path.write_bytes(b"something else")
    device = CudaDevice()
    with pytest.raises(
        CheckpointError,
        match=r"built with tensorrt_rtx 1.7, fake_tensorrt 1.0 cannot load it on GPU 0: Magic tag does not match",
    ):
        tensorrt_cuda.CudaSession(
            path,
            device=device,
            tables=SharedTables(device, {}),
            pair=device_pair_memory(device),
            built_with="tensorrt_rtx 1.7",
        )


@pytest.mark.usefixtures("cuda")
def test_a_table_of_another_size_is_refused(home: Home, tmp_path: Path) -> None:
    shutil.copytree(home.folder, tmp_path / "engine")
    path = tmp_path / "engine" / "embed_tokens.table"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"embed_tokens.table: must have 6400 bytes, has 6396 bytes"):
        home.pair(tmp_path / "engine")
    raw = json.loads((tmp_path / "engine" / "export.json").read_text())
    raw["files"][0] = asdict(told_of(path))
    (tmp_path / "engine" / "export.json").write_text(json.dumps(raw))
    target = home.pair(tmp_path / "engine").target
    with pytest.raises(
        CheckpointError, match=r"table embed_tokens \[32, 50\] must have 6400 bytes, got 6396"
    ):
        target.allocate_cache(num_pages=4, page_size=PAGE)


@pytest.mark.parametrize(
    ("function", "status", "kind", "told"),
    [
        (
            "cudaMalloc",
            CudaError.cudaErrorMemoryAllocation,
            CapacityError,
            r"cudaMalloc failed for inputs, outputs and caches of target.plan on GPU 0: cudaErrorMemoryAllocation "
            r"\(words for 2\); it needs \d+ bytes",
        ),
        (
            "cudaGraphInstantiate",
            CudaError.cudaErrorIllegalAddress,
            EngineError,
            r"failed for the graph of a call of tokens \[1\], .* of target.plan on GPU 0: cudaErrorIllegalAddress",
        ),
    ],
)
def test_a_call_that_fails_at_the_start_is_named(
    function: str, status: Any, kind: Any, told: str, home: Home, cuda: FakeCuda
) -> None:
    target = home.pair().target
    cuda.fail[function] = status
    with pytest.raises(kind, match=told):
        target.allocate_cache(num_pages=4, page_size=PAGE)


def test_a_step_that_fails_names_its_shapes(home: Home, cuda: FakeCuda) -> None:
    target = home.pair().target
    target.allocate_cache(num_pages=12, page_size=PAGE)
    cuda.fail["cudaStreamSynchronize"] = CudaError.cudaErrorIllegalAddress
    with pytest.raises(
        EngineError, match=r"cudaStreamSynchronize failed for a call of tokens \[2\], .*\(words for 700\)"
    ):
        target.forward(ragged(np.random.default_rng(0), [2], [0]))


def test_no_room_for_a_table_frees_the_others(tmp_path: Path, cuda: FakeCuda) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"missing: cannot be read: .*; build the engine again"):
        SharedTables(CudaDevice(), {"a": tmp_path / "a", "b": tmp_path / "missing"})
    assert not cuda.memory


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_device.importlib, "import_module", lambda _: FakeCuda())
    with pytest.raises(ConfigError, match="device: got cuda:1, allowed are cuda:0 to cuda:0"):
        CudaDevice(1)
