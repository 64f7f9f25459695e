"""Start one compiled form of a kernel on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark_plugins.kernels.plans import Variant

__all__ = ["DTYPE_NAMES", "arguments_on_gpu", "empty", "start"]

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def start(kernel: Any, variant: Variant, grid: tuple[int, ...], *arguments: Tensor | int | float) -> None:
    """Launch on the current stream; an empty grid is no launch."""
    if 0 in grid:
        return
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.max_registers:
        options["maxnreg"] = variant.max_registers
    if variant.cooperative:
        options["launch_cooperative_grid"] = True
    if not arguments_on_gpu(*arguments):
        options = {}  # the interpreter has no use for them
    kernel[grid](*arguments, **variant.constants, **options)


def arguments_on_gpu(*arguments: Tensor | int | float) -> bool:
    """Return whether the tensors among arguments are on a GPU."""
    return any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments)


def empty(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return uninitialised memory on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)
