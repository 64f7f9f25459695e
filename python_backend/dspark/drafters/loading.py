"""From the name a user gives to a drafter: `none`, `ngram`, or the folder of a checkpoint."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from dspark.config import drafter_dtype
from dspark.drafters.checkpoint import load_drafter_checkpoint
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.drafters.none import NoneDrafter
from dspark.errors import ConfigError
from dspark.executors.interface import BlockDrafterExecutor, TargetExecutor
from dspark.models.config import TargetConfig

__all__ = ["DrafterOutline", "ExecutorName", "load_drafter", "peek_drafter"]

ExecutorName = Literal["auto", "torch", "native"]
_EXECUTORS = {
    "native": ("dspark.executors.native_drafter", "NativeBlockDrafter"),
    "torch": ("dspark.executors.torch_drafter", "TorchBlockDrafter"),
}


class DrafterOutline(NamedTuple):
    """What the target executor must know of a drafter before either is built."""

    feature_layer_ids: tuple[int, ...]  # -1 = the embedding output
    block_size: int  # G, 0 = never drafts
    has_confidence: bool = False


def peek_drafter(spec: str, target: TargetConfig) -> DrafterOutline:
    """Check a drafter against the target and say which features it wants, without loading weights.

    Raises:
        ConfigError: not `none`, `ngram` or a folder.
        CheckpointError: a folder that cannot be served with this target.
    """
    builtin = _builtin(spec)
    if builtin is not None:
        return DrafterOutline(builtin.feature_layer_ids, builtin.block_size)
    config = load_drafter_checkpoint(spec, target=target).config
    return DrafterOutline(config.target_layer_ids, config.block_size, config.enable_confidence_head)


def load_drafter(
    spec: str,
    *,
    target: TargetConfig,
    target_executor: TargetExecutor,
    executor: ExecutorName = "auto",
    dtype: str = "float32",
    device: str = "cpu",
) -> Drafter:
    """Build a drafter.

    Arguments:
        spec: `none`, `ngram`, or the folder of a checkpoint.
        target: the target's configuration.
        target_executor: gives embedding and LM head where the checkpoint has none of its own.
        executor: what runs a checkpoint; auto takes the native one where it can be loaded, else torch.
        dtype: of a checkpoint's weights; auto as the setting drafter_dtype has it.
        device: of a checkpoint's weights; the native executor runs on the CPU only.

    Raises:
        ConfigError: not a drafter, an unknown executor, or one that cannot be loaded.
        CheckpointError: a folder that cannot be served with this target.
    """
    builtin = _builtin(spec)
    if builtin is not None:
        return builtin
    checkpoint = load_drafter_checkpoint(spec, target=target)
    if target_executor.feature_layer_ids != checkpoint.config.target_layer_ids:
        raise ConfigError(
            f"feature_layer_ids: the drafter reads target layers {checkpoint.config.target_layer_ids}, "
            f"the target executor was made for {target_executor.feature_layer_ids}"
        )
    build = _executor_class(executor, device)
    native = build.__name__ == "NativeBlockDrafter"
    if dtype == "auto":
        name = "native" if native else "torch"
        dtype = drafter_dtype(dtype, executor=name, target_dtype=target_executor.dtype)
    options: dict[str, Any] = {} if native else {"device": device}
    if native and target_executor.name == "native":
        options["target"] = target_executor  # its packed embedding and head are shared, its threads too
    else:
        options["target_embedding"], options["target_head"] = target_executor.embedding_and_head()
    block_executor = build(checkpoint, dtype=dtype, **options)
    return DSparkDrafter(cast(BlockDrafterExecutor, block_executor), checkpoint.draft_to_target)


def _builtin(spec: str) -> Drafter | None:
    """Return the drafter of a reserved name, None for an existing folder."""
    if spec == "none":
        return NoneDrafter()
    if spec == "ngram":
        return NgramDrafter()
    if not spec or not Path(spec).is_dir():
        raise ConfigError(f"drafter: must be none, ngram or the folder of a checkpoint, got {spec!r}")
    return None


def _executor_class(name: ExecutorName, device: str) -> type[Any]:
    """Import one executor, and with it torch or the native library only where it is used."""
    if name not in ("auto", *_EXECUTORS):
        raise ConfigError(f"executor: must be auto, native or torch, got {name!r}")
    if name == "native" and device != "cpu":
        raise ConfigError(f"device: the native executor runs on cpu, got {device!r}")
    wanted: tuple[str, ...] = (name,)
    if name == "auto":
        wanted = ("native", "torch") if device == "cpu" else ("torch",)
    failures = []
    for candidate in wanted:
        module, class_name = _EXECUTORS[candidate]
        try:
            return cast(type[Any], getattr(importlib.import_module(module), class_name))
        except (ImportError, OSError) as error:
            failures.append(f"{candidate}: {error}")
    raise ConfigError(f"executor: {name} cannot be loaded ({'; '.join(failures)})")
