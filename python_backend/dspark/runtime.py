"""From settings to a running engine: loads the models, picks the executors, sizes the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dspark.config import ServeConfig
from dspark.drafters.interface import Drafter
from dspark.drafters.loading import load_drafter, peek_drafter
from dspark.engine.admission import EngineLimits
from dspark.engine.engine import Engine
from dspark.engine.thread import EngineThread
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint, load_target
from dspark.models.tokenizer import Tokenizer
from dspark.scheduling.scheduler import Scheduler, make_scheduler

__all__ = ["Runtime", "build_engine", "load_runtime", "resolve_drafter"]

Progress = Callable[[str], None]


def _silent(_message: str) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A started engine and what the serving side needs beside it."""

    engine: EngineThread
    scheduler: Scheduler  # the engine's; touched by its thread alone
    tokenizer: Tokenizer | None
    target_config: TargetConfig
    limits: EngineLimits
    config: ServeConfig


def load_runtime(config: ServeConfig, *, progress: Progress = _silent, base: Path | None = None) -> Runtime:
    """Load everything and start the engine thread.

    Arguments:
        base: folder in which `drafter: auto` looks for a trained drafter.

    Raises:
        ConfigError, CheckpointError: naming what cannot be used.
    """
    engine = build_engine(config, progress=progress, base=base)
    thread = EngineThread(engine, max_queue_size=config.max_queue_size)
    thread.start()
    return Runtime(
        engine=thread,
        scheduler=engine.scheduler,
        tokenizer=engine.tokenizer,
        target_config=engine.target.config,
        limits=engine.limits,
        config=config,
    )


def build_engine(config: ServeConfig, *, progress: Progress = _silent, base: Path | None = None) -> Engine:
    """Load target and drafter and return an engine that nobody runs yet. Arguments and errors as `load_runtime`."""
    progress(f"reading {config.target}")
    checkpoint = load_target(config.target)
    spec = resolve_drafter(config.drafter, base=base)
    outline = peek_drafter(spec, checkpoint.config)
    executor = choose_executor(config.executor)
    dtype = config.dtype
    target = make_target(
        checkpoint, executor=executor, dtype=dtype, layer_ids=outline.feature_layer_ids, config=config
    )
    progress(f"target {checkpoint.config.architecture}, executor {target.name}, {target.dtype}")
    drafter = load_drafter(
        spec, target=checkpoint.config, target_executor=target, executor=executor, dtype=target.dtype
    )
    progress(f"drafter {drafter.name}, block {outline.block_size}")
    scheduler = make_scheduler(
        config.policy, block_size=outline.block_size, has_confidence=outline.has_confidence
    )
    limits = engine_limits(config, target, drafter)
    progress(f"cache {limits.num_pages * limits.page_size} tokens in pages of {limits.page_size}")
    return Engine(
        target=target,
        drafter=drafter,
        scheduler=scheduler,
        limits=limits,
        tokenizer=checkpoint.tokenizer,
        rule=config.rule,
    )


def resolve_drafter(spec: str, *, base: Path | None) -> str:
    """Return the drafter that `auto` stands for: a trained one under `base`, else n-gram look-up."""
    if spec != "auto":
        return spec
    if base is not None and (base / "drafter" / "config.json").is_file():
        return str(base / "drafter")
    return "ngram"


def choose_executor(name: str) -> Literal["native", "torch"]:
    """Return the executor that runs here; `auto` takes native where it can.

    Raises:
        ConfigError: native was asked for and cannot run; says why.
    """
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


def engine_limits(config: ServeConfig, target: TargetExecutor, drafter: Drafter) -> EngineLimits:
    """Return limits whose caches, target's and drafter's together, take at most `cache_bytes`.

    Raises:
        ConfigError: when that is less than one page, or the context asked for is longer than the model's.
    """
    model_context = target.config.max_context_len
    context = config.max_context_len or model_context
    if context > model_context:
        raise ConfigError(f"max_context_len: got {context}, allowed is at most the model's {model_context}")
    page_bytes = target.cache_page_bytes(config.page_size) + drafter.cache_page_bytes(config.page_size)
    num_pages = config.cache_bytes // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"cache_bytes: got {config.cache_bytes}, allowed is at least {page_bytes}, one page"
        )
    # More pages than a full batch of the longest sequences could never be used.
    most = config.max_batch_size * -(-context // config.page_size)
    return EngineLimits(
        max_batch_size=config.max_batch_size,
        max_context_len=context,
        max_step_tokens=config.max_step_tokens,
        num_pages=min(num_pages, most),
        page_size=config.page_size,
    )
