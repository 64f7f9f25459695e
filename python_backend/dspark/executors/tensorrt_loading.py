"""From a folder of exported graphs or built engines to executors: checks that it fits, opens sessions, pairs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.identity import drafter_identity
from dspark.errors import CheckpointError
from dspark.executors.pair_memory import host_pair_memory
from dspark.executors.tensorrt_bindings import (
    TABLE_SUFFIX,
    Binding,
    drafter_bindings,
    shared_tables,
    target_bindings,
)
from dspark.executors.tensorrt_buckets import EngineShapes
from dspark.executors.tensorrt_drafter import TensorRTBlockDrafter
from dspark.executors.tensorrt_manifest import (
    ENGINE_NAME,
    ENGINE_VERSION,
    ExportManifest,
    check_files,
    check_pair,
    load_export,
    manifest_of,
)
from dspark.executors.tensorrt_session import Session
from dspark.executors.tensorrt_target import TensorRTTarget
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint

__all__ = [
    "Backend",
    "BuiltEngine",
    "EnginePair",
    "built_engine",
    "check_capability",
    "checked_export",
    "engine_shapes",
    "load_engine_pair",
]

Backend = Literal["tensorrt", "onnxruntime"]


class EnginePair(NamedTuple):
    """What `load_engine_pair` gives: executors that share page ids."""

    target: TensorRTTarget
    drafter: DSparkDrafter | None


class BuiltEngine(NamedTuple):
    """What `built_engine` gives."""

    shapes: EngineShapes
    sm: int  # compute capability, 89 for 8.9
    tensorrt: str  # name and version of what built it


def checked_export(
    folder: Path, *, target: TargetConfig, drafter: DrafterCheckpoint | None, page_size: int
) -> ExportManifest:
    """Read the manifest of a folder and check that it is of this pair, with this page size, and whole.

    Raises:
        CheckpointError: names what does not match, and both values.
    """
    manifest = load_export(folder)
    precision, layers = manifest.precision, manifest.feature_layer_ids
    bindings: tuple[Binding, ...] = ()
    if drafter is not None:
        config = drafter.config
        shared = shared_tables(
            config,
            precision=precision,
            tied=target.tie_word_embeddings,
            own_embedding=drafter.own_embedding,
            own_head=drafter.own_head,
        )
        bindings = drafter_bindings(config, precision=precision, shared=shared)
    check_pair(
        manifest,
        target_hash=target.model_hash,
        drafter_hash=drafter_identity(str(drafter.folder)) if drafter else "",
        page_size=page_size,
        target_bindings=target_bindings(
            target, precision=precision, feature_layer_ids=layers, verify=manifest.verify
        ),
        drafter_bindings=bindings,
    )
    check_files(folder, manifest)
    return manifest


def engine_shapes(
    *, max_sequences: int, max_step_tokens: int, max_context_len: int, page_size: int, block_size: int
) -> EngineShapes:
    """Return shapes that hold every call of an engine with these limits.

    Arguments:
        max_step_tokens: prompt rows of a step; a row and a block for every sequence come on top.
    """
    return _shapes(
        max_sequences,
        max_step_tokens,
        max_pages=-(-(max_context_len + block_size) // page_size) + 1,
        block_size=block_size,
    )


def built_engine(folder: Path) -> BuiltEngine:
    """Return what the plans in a folder were built for, from its engine.json.

    Raises:
        CheckpointError: there is none, it is of another format, or does not say.
    """
    with manifest_of(folder, ENGINE_NAME, ENGINE_VERSION, "dspark-build engine") as raw:
        limits = raw["limits"]
        shapes = _shapes(
            limits["max_batch"],
            limits["max_tokens"],
            max_pages=limits["max_pages"],
            block_size=limits["block_size"],
        )
        return BuiltEngine(shapes, int(raw["sm"]), str(raw["tools"]["tensorrt"]))


def check_capability(folder: Path, built: int, found: int) -> None:
    """Refuse plans for another GPU before TensorRT does, which does not say why.

    Arguments:
        built, found: compute capability of the plans and of the GPU, 89 for 8.9.

    Raises:
        CheckpointError: they differ.
    """
    if built != found:
        raise CheckpointError(
            f"{folder}: sm: the engine was built for {built}, this GPU is {found}; build it again with `dspark-build "
            f"engine --sm {found}`"
        )


def _shapes(max_sequences: int, max_step_tokens: int, *, max_pages: int, block_size: int) -> EngineShapes:
    steps = max_sequences * (1 + block_size)
    return EngineShapes(
        max_sequences=max_sequences,
        max_tokens=max_step_tokens + steps,
        max_logit_rows=steps + max_sequences,
        max_pages=max_pages,
        max_new_rows=max_step_tokens + steps,
        max_words=-(-(1 + block_size) // 32),
    )


def load_engine_pair(
    folder: Path,
    *,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint | None,
    page_size: int,
    shapes: EngineShapes,
    backend: Backend = "tensorrt",
    num_threads: int = 0,
    device: int = 0,
) -> EnginePair:
    """Load target and, where there is one, drafter.

    Arguments:
        folder: what `dspark-build export` left, for TensorRT with target.plan and drafter.plan beside it.
        shapes: the largest calls; for TensorRT those of `built_engine` or less.
        num_threads: of ONNX Runtime; 0 = one per core.
        device: CUDA's number of TensorRT's GPU.

    Raises:
        CheckpointError: the folder is of another pair, a file in it is not the one that was made, also where it is as
            long, or cannot be loaded.
        ConfigError: TensorRT, a GPU or ONNX Runtime is missing.
    """
    manifest = checked_export(folder, target=target.config, drafter=drafter, page_size=page_size)
    check_files(folder, manifest, contents=True)
    open_session = (
        _cuda_opener(folder, manifest, device) if backend == "tensorrt" else _onnx_opener(folder, num_threads)
    )
    executor = TensorRTTarget(
        open_session("target"),
        target.config,
        target.weights,
        precision=manifest.precision,
        feature_layer_ids=manifest.feature_layer_ids,
        shapes=shapes,
        verify=manifest.verify,
    )
    if drafter is None:
        return EnginePair(executor, None)
    block = TensorRTBlockDrafter(
        open_session("drafter"), drafter, precision=manifest.precision, shapes=shapes
    )
    return EnginePair(executor, DSparkDrafter(block, drafter.draft_to_target))


def _onnx_opener(folder: Path, num_threads: int) -> Callable[[str], Session]:
    from dspark.executors.onnx_session import OnnxSession

    pair = host_pair_memory()

    def open_session(part: str) -> Session:
        graph = folder / f"{part}.onnx"
        if not graph.is_file():
            raise CheckpointError(
                f"{graph} is missing; ONNX Runtime runs what `dspark-build export` leaves, or the --onnx folder of "
                "`dspark-build engine`"
            )
        return OnnxSession(graph, num_threads=num_threads, pair=pair)

    return open_session


def _cuda_opener(folder: Path, manifest: ExportManifest, number: int) -> Callable[[str], Session]:
    """Return what opens a plan; both plans read the same tables."""
    from dspark.executors.tensorrt_cuda import CudaSession
    from dspark.executors.tensorrt_device import CudaDevice, SharedTables, device_pair_memory

    device, built = CudaDevice(number), built_engine(folder)
    check_capability(folder, built.sm, device.capability())
    files = [folder / file.name for file in manifest.files if file.name.endswith(TABLE_SUFFIX)]
    tables = SharedTables(device, {path.name.removesuffix(TABLE_SUFFIX): path for path in files})
    pair = device_pair_memory(device)

    def open_session(part: str) -> Session:
        path = folder / f"{part}.plan"
        return CudaSession(path, device=device, tables=tables, pair=pair, built_with=built.tensorrt)

    return open_session
