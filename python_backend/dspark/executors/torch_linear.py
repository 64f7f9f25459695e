"""Products of rows and weight matrices on the CPU, run with few different numbers of rows.

oneDNN makes code of its own for every number of rows it meets, about half a megabyte for each shape of a matrix, and
keeps it: a server that sees every number from 1 to 300 would hold 200 MB of it for each shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

__all__ = ["Linear", "linear", "of_few_sizes", "padded_rows"]

Linear = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out]


def padded_rows(num_rows: int) -> int:
    """Return the number of rows a product is run with, at least `num_rows` and at least 1.

    Every number up to 8, then four to a doubling, so that at most a fifth is padding.
    """
    if num_rows <= 8:
        return max(num_rows, 1)
    step = 1 << ((num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def of_few_sizes(product: Linear) -> Linear:
    """Return the same product of rows [T, in], run on `padded_rows(T)` of them."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        num_rows = len(x)
        padding = padded_rows(num_rows) - num_rows
        return product(F.pad(x, (0, 0, 0, padding)))[:num_rows] if padding else product(x)

    return padded


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias for x [T, in], weight [out, in], bias [out]; all of one dtype."""
    if x.device.type != "cpu" or x.dtype == torch.float32:  # no code is made for these
        return F.linear(x, weight, bias)
    return of_few_sizes(lambda rows: F.linear(rows, weight, bias))(x)
