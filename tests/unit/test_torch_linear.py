"""Products that are run with few numbers of rows: the same numbers, and memory that does not grow with the traffic."""

from __future__ import annotations

import psutil
import pytest
import torch
from dspark.executors.torch_linear import linear, padded_rows
from dspark.executors.torch_target import _linear
from torch.nn import functional as F

WIDE, NARROW = 1536, 576  # a shape whose code is not small
DTYPES = [torch.float32, torch.bfloat16]


def weight(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(WIDE, NARROW, generator=torch.Generator().manual_seed(1)).to(dtype)


def rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, NARROW, generator=torch.Generator().manual_seed(count)).to(dtype)


def test_padding_is_at_most_a_fifth_and_sizes_are_few() -> None:
    sizes = [padded_rows(count) for count in range(1, 513)]
    assert all(count <= size for count, size in enumerate(sizes, start=1))
    assert all(size - count <= size / 5 for count, size in enumerate(sizes, start=1))
    assert len(set(sizes)) == 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 16, 17, 33, 100])
def test_padded_products_equal_plain_ones(count: int, dtype: torch.dtype) -> None:
    x, matrix = rows(count, dtype), weight(dtype)
    bias = torch.arange(WIDE).to(dtype)
    expected = F.linear(x.float(), matrix.float())
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, matrix).float(), expected, rtol=0.02, atol=0.2)
        torch.testing.assert_close(_linear(matrix)(x).float(), expected, rtol=0.02, atol=0.2)
        torch.testing.assert_close(
            linear(x, matrix, bias).float(), expected + bias.float(), rtol=0.02, atol=4.0
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("laid_out", [True, False])
def test_memory_does_not_grow_with_the_numbers_of_rows_seen(dtype: torch.dtype, laid_out: bool) -> None:
    matrix = weight(dtype)
    product = _linear(matrix) if laid_out else lambda x: linear(x, matrix)
    with torch.inference_mode():
        for count in range(1, 151, 15):
            product(rows(count, dtype))
        before = psutil.Process().memory_info().rss
        for count in range(1, 151):
            product(rows(count, dtype))
    assert psutil.Process().memory_info().rss - before < 40e6
