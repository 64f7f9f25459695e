"""From a folder of exported graphs or built engines to executors: checks that it fits, opens sessions, pairs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.identity import drafter_identity
from dspark.errors import CheckpointError
from dspark.executors.tensorrt_bindings import (
    Binding,
    drafter_bindings,
    shared_tables,
    target_bindings,
)
from dspark.executors.tensorrt_buckets import EngineShapes
from dspark.executors.tensorrt_drafter import TensorRTBlockDrafter
from dspark.executors.tensorrt_manifest import ExportManifest, check_files, check_pair, load_export
from dspark.executors.tensorrt_session import Session
from dspark.executors.tensorrt_target import TensorRTTarget
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint

__all__ = ["Backend", "EnginePair", "built_shapes", "checked_export", "engine_shapes", "load_engine_pair"]

Backend = Literal["tensorrt", "onnxruntime"]


class EnginePair(NamedTuple):
    """What `load_engine_pair` gives: executors that share page ids."""

    target: TensorRTTarget
    drafter: DSparkDrafter | None


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
        target_bindings=target_bindings(target, precision=precision, feature_layer_ids=layers),
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


def built_shapes(folder: Path) -> EngineShapes:
    """Return the shapes that the plans in a folder were built for, from its engine.json.

    Raises:
        CheckpointError: there is none, or it does not say.
    """
    path = folder / "engine.json"
    try:
        limits = json.loads(path.read_text(encoding="utf-8"))["limits"]
        return _shapes(
            limits["max_batch"],
            limits["max_tokens"],
            max_pages=limits["max_pages"],
            block_size=limits["block_size"],
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: has no engine.json; make it with `dspark-build engine`") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


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
) -> EnginePair:
    """Load target and, where there is one, drafter.

    Arguments:
        folder: what `dspark-build export` left, for TensorRT with target.plan and drafter.plan beside it.
        shapes: the largest calls; for TensorRT those of `built_shapes` or less.
        num_threads: of ONNX Runtime; 0 = one per core.

    Raises:
        CheckpointError: the folder is of another pair, or a file in it cannot be loaded.
        ConfigError: TensorRT, a GPU or ONNX Runtime is missing.
    """
    manifest = checked_export(folder, target=target.config, drafter=drafter, page_size=page_size)
    executor = TensorRTTarget(
        _session(folder, "target", backend, num_threads),
        target.config,
        target.weights,
        precision=manifest.precision,
        feature_layer_ids=manifest.feature_layer_ids,
        shapes=shapes,
    )
    if drafter is None:
        return EnginePair(executor, None)
    block = TensorRTBlockDrafter(
        _session(folder, "drafter", backend, num_threads),
        drafter,
        precision=manifest.precision,
        shapes=shapes,
    )
    return EnginePair(executor, DSparkDrafter(block, drafter.draft_to_target))


def _session(folder: Path, part: str, backend: Backend, num_threads: int) -> Session:
    if backend == "onnxruntime":
        from dspark.executors.onnx_session import OnnxSession

        graph = folder / f"{part}.onnx"
        if not graph.is_file():
            raise CheckpointError(
                f"{graph} is missing; ONNX Runtime runs what `dspark-build export` leaves, or the --onnx folder of "
                "`dspark-build engine`"
            )
        return OnnxSession(graph, num_threads=num_threads)
    from dspark.executors.tensorrt_cuda import CudaSession

    return CudaSession(folder / f"{part}.plan")
