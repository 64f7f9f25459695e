"""From the settings `executor: tensorrt` or `onnxruntime` and `engine:` to executors, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from dspark.config import ServeConfig
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.loading import DrafterOutline
from dspark.errors import ConfigError
from dspark.executors.device import chosen_device, gpu_number
from dspark.executors.tensorrt_bindings import DTYPE_NAMES
from dspark.executors.tensorrt_buckets import EngineShapes
from dspark.executors.tensorrt_loading import (
    Backend,
    EnginePair,
    built_engine,
    checked_export,
    engine_shapes,
    load_engine_pair,
)
from dspark.models.loading import TargetCheckpoint

__all__ = ["ServedEngine", "load_served_engine"]


class ServedEngine(NamedTuple):
    """What `load_served_engine` gives."""

    pair: EnginePair
    max_context_len: int  # the longest that may be asked for: the model's, or what the engine was built for


def load_served_engine(
    config: ServeConfig,
    target: TargetCheckpoint,
    *,
    spec: str,
    outline: DrafterOutline,
    base: Path | None,
) -> ServedEngine:
    """Load the engine that the settings name.

    Arguments:
        spec, outline: the drafter; a builtin one needs no engine of its own.
        base: folder of model.yaml, in which `engine` is looked up, too.

    Raises:
        ConfigError: `engine` is no folder, settings that contradict it, or TensorRT, a GPU or ONNX Runtime is missing.
        CheckpointError: an engine of another pair or page size, or one that cannot be loaded.
    """
    folder = _folder(config, base)
    backend = cast(Backend, config.executor)
    checkpoint = load_drafter_checkpoint(spec, target=target.config) if outline.feature_layer_ids else None
    built = built_engine(folder).shapes if backend == "tensorrt" else None
    manifest = checked_export(
        folder, target=target.config, drafter=checkpoint, page_size=config.page_size
    )  # before its numbers are believed
    problems: list[str] = []
    longest = target.config.max_context_len
    if built is not None:
        longest = min(longest, _longest_context(built, config.page_size, outline.block_size))
    asked = replace(config, max_context_len=config.max_context_len or longest)
    dtype = DTYPE_NAMES[manifest.precision]
    problems += [
        f"{name}: got {value!r}, the engine in {folder} computes in {dtype}; allowed is auto or {dtype}"
        for name in ("dtype", "drafter_dtype")
        if (value := getattr(config, name)) not in ("auto", dtype)
    ]
    if built is not None:
        problems += _beyond(built, asked, longest, block_size=outline.block_size, folder=folder)
    if problems:
        raise ConfigError("\n".join(problems))
    shapes = engine_shapes(
        max_sequences=asked.max_batch_size,
        max_step_tokens=asked.max_step_tokens,
        max_context_len=asked.max_context_len,
        page_size=config.page_size,
        block_size=outline.block_size,
    )
    if backend == "onnxruntime":
        shapes = replace(shapes, graph_tokens=0)  # binding is all it could prepare
    pair = load_engine_pair(
        folder,
        target=target,
        drafter=checkpoint,
        page_size=config.page_size,
        shapes=shapes,
        backend=backend,
        num_threads=config.num_threads,
        device=gpu_number(chosen_device(config.executor, config.device)),
    )
    return ServedEngine(pair, longest)


def _folder(config: ServeConfig, base: Path | None) -> Path:
    """Return the folder that `engine` names, which the working folder or `base` has.

    Raises:
        ConfigError: nothing is named, or neither has it.
    """
    made_by = "`dspark-build engine`" if config.executor == "tensorrt" else "`dspark-build export`"
    if not config.engine:
        raise ConfigError(f"engine: not given; executor {config.executor} runs a folder of {made_by}")
    path = Path(config.engine).expanduser()
    for folder in [path] if base is None else [path, base / path]:
        if folder.is_dir():
            return folder
    raise ConfigError(f"engine: got {config.engine!r}, which is no folder; make one with {made_by}")


def _longest_context(built: EngineShapes, page_size: int, block_size: int) -> int:
    """Return the tokens of the longest sequence whose page table the plans take, as `engine_shapes` counts."""
    return (built.max_pages - 1) * page_size - block_size


def _beyond(
    built: EngineShapes, asked: ServeConfig, longest: int, *, block_size: int, folder: Path
) -> Iterator[str]:
    """Yield each limit that is more than the plans take with blocks of `block_size` drafts."""
    rows = 1 + block_size  # of a sequence that verifies a whole block
    sequences = min(built.max_sequences, built.max_logit_rows // (1 + rows), (built.max_tokens - 1) // rows)
    step_tokens = built.max_tokens - min(asked.max_batch_size, sequences) * rows
    for name, most in (
        ("max_batch_size", sequences),
        ("max_step_tokens", step_tokens),
        ("max_context_len", longest),
    ):
        value = getattr(asked, name)
        if value > most:
            yield f"{name}: got {value}, allowed is at most {most}: the engine in {folder} was built for no more"
