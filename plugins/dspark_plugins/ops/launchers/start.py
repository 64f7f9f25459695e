"""Start one compiled form of a kernel on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark_plugins.kernels.plans import Variant

__all__ = ["DTYPE_NAMES", "empty", "start"]

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def start(kernel: Any, variant: Variant, grid: tuple[int, ...], *arguments: Tensor | int | float) -> None:
    """Launch on the current stream; an empty grid is no launch."""
    if 0 in grid:
        return
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if variant.cooperative and arguments and isinstance(arguments[0], Tensor) and arguments[0].is_cuda:
        options["launch_cooperative_grid"] = True
    kernel[grid](*arguments, **variant.constants, **options)


def empty(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """Return uninitialised memory on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)
