"""From settings to a target executor: which one runs here, in which type, on how many threads."""

from __future__ import annotations

from typing import Literal

from dspark.config import ServeConfig
from dspark.errors import ConfigError
from dspark.executors.interface import TargetExecutor
from dspark.models.loading import TargetCheckpoint

__all__ = ["choose_executor", "make_target"]


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
