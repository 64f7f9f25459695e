"""From settings to executors: which ones run here, in which type, on how many threads; target and drafter together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from dspark.config import ENGINE_EXECUTORS, EXECUTOR_DTYPES, ServeConfig
from dspark.drafters.interface import Drafter
from dspark.drafters.kinds import check_kind
from dspark.drafters.loading import DrafterOutline, load_drafter
from dspark.errors import ConfigError
from dspark.executors.device import chosen_device
from dspark.executors.interface import TargetExecutor
from dspark.models.loading import TargetCheckpoint

__all__ = ["LoadedPair", "choose_executor", "load_pair", "make_target"]


class LoadedPair(NamedTuple):
    """A target and its drafter, whose caches nobody has allocated yet."""

    target: TargetExecutor
    drafter: Drafter
    max_context_len: int  # the longest that may be asked for: the model's, or what its engine was built for


def load_pair(
    checkpoint: TargetCheckpoint,
    *,
    spec: str,
    outline: DrafterOutline,
    config: ServeConfig,
    base: Path | None,
) -> LoadedPair:
    """Load target and drafter into the executors that the settings name.

    Arguments:
        checkpoint: the target.
        spec, outline: name or folder of the drafter, and what `peek_drafter` says of it.
        base: folder of model.yaml, in which `engine` is looked up, too.

    Raises:
        ConfigError: an executor that cannot run here, or settings that it cannot meet.
        CheckpointError: an engine that cannot be used, or is of another pair.
    """
    check_kind(outline.kind, executor=config.executor)
    device = chosen_device(config.executor, config.device)
    load = partial(load_drafter, spec, target=checkpoint.config, num_draft_tokens=config.num_draft_tokens)
    if config.executor in ENGINE_EXECUTORS:
        from dspark.executors.tensorrt_settings import load_served_engine

        (engine, drafter), longest = load_served_engine(
            config, checkpoint, spec=spec, outline=outline, base=base
        )
        # A builtin drafter has nothing that an engine could run, a draft model brings an executor of its own.
        used = drafter or load(target_executor=engine, dtype=config.drafter_dtype, device=device)
        return LoadedPair(engine, used, longest)
    if device != "cpu":
        from dspark.executors.torch_cuda import load_pair_on

        on_gpu, drafts = load_pair_on(device, checkpoint, spec=spec, outline=outline, config=config)
        others = drafts or load(target_executor=on_gpu, dtype=config.drafter_dtype, device=device)
        return LoadedPair(on_gpu, others, checkpoint.config.max_context_len)
    executor = choose_executor(config.executor)
    if config.drafter_dtype not in EXECUTOR_DTYPES[executor]:
        raise ConfigError(
            f"drafter_dtype: got {config.drafter_dtype!r}, allowed with the {executor} executor is "
            + ", ".join(EXECUTOR_DTYPES[executor])
        )
    target = make_target(
        checkpoint,
        executor=executor,
        dtype=config.dtype,
        layer_ids=outline.feature_layer_ids,
        config=config,
    )
    loaded = load(target_executor=target, executor=executor, dtype=config.drafter_dtype)
    return LoadedPair(target, loaded, checkpoint.config.max_context_len)


def choose_executor(name: str) -> Literal["native", "torch"]:
    """Return the executor of checkpoints that runs here; `auto` takes native where it can, never an engine.

    Raises:
        ConfigError: native was asked for and cannot run, says why; or one that runs engines.
    """
    if name not in ("auto", "native", "torch"):
        raise ConfigError(
            f"executor: got {name!r}, which takes no checkpoint; allowed here is auto, native, torch"
        )
    if name == "torch":
        return "torch"
    from dspark_plugins.native import native_available, native_unavailable_reason

    if native_available():
        return "native"
    if name == "native":
        raise ConfigError(f"executor: got 'native', which cannot run here: {native_unavailable_reason()}")
    return "torch"


def make_target(
    checkpoint: TargetCheckpoint,
    *,
    executor: Literal["native", "torch"],
    dtype: str,
    layer_ids: tuple[int, ...],
    config: ServeConfig,
) -> TargetExecutor:
    """Load the target's weights into an executor. Raises ConfigError for a dtype the executor has not."""
    threads = config.num_threads or None
    if executor == "native":
        from dspark_plugins.native import preferred_dtype

        from dspark.executors.native_target import NativeTarget

        return NativeTarget(
            checkpoint.config,
            checkpoint.weights,
            dtype=preferred_dtype() if dtype == "auto" else dtype,
            feature_layer_ids=layer_ids,
            num_threads=threads,
            pin_threads=config.pin_threads,
            touch_cache=config.touch_cache,
        )
    from dspark.executors.dtype import auto_dtype
    from dspark.executors.torch_target import TorchTarget

    return TorchTarget(
        checkpoint.config,
        checkpoint.weights,
        dtype=auto_dtype() if dtype == "auto" else dtype,
        feature_layer_ids=layer_ids,
        num_threads=threads,
    )
