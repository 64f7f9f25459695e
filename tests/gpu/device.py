"""What this GPU can do: measured bandwidth and arithmetic, and the time of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Speed", "capture", "measure_speed", "seconds_of"]


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured with this version of torch, on this GPU."""

    bytes_per_s: float  # read and written by a copy
    flops_per_s: float  # of a bf16 product

    def floor(self, num_bytes: float, flops: float) -> tuple[float, str]:
        """Return the least seconds of a launch, and what decides them."""
        memory, arithmetic = num_bytes / self.bytes_per_s, flops / self.flops_per_s
        return max(memory, arithmetic), "memory" if memory > arithmetic else "arithmetic"


def capture(call: Callable[[], Any], *, times: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record calls in a CUDA graph; return it and what the last call gave."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, and allocates what a capture must not
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for _ in range(times):
            out = call()
    return graph, out


def seconds_of(call: Callable[[], Any], *, times: int = 10, rounds: int = 5) -> float:
    """Return the least seconds of one call, without what the host adds."""
    graph, _ = capture(call, times=times)
    best = float("inf")
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / times)
    return best


def measure_speed() -> Speed:
    """Measure a copy of 1 GiB and a product of 8192 x 8192 matrices."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), times=4)
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = seconds_of(lambda: a @ b, times=4)
    return Speed(bytes_per_s=2 * (1 << 30) / copy_s, flops_per_s=2 * n**3 / product_s)
