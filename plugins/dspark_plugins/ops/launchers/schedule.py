"""Launcher of `schedule`."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.schedule import schedule_kernel
from dspark_plugins.ops.launchers.start import empty, start

__all__ = ["launch_schedule"]


def launch_schedule(
    confidence: Tensor, num_drafts: Tensor, budgets: Tensor, step: Tensor, seconds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `dspark::schedule` says, in one program."""
    num_sequences, block_size = confidence.shape
    total = num_sequences * block_size
    verify_len, query_start, row_source, new_budgets, rank_of = (
        empty(confidence, torch.int32, n)
        for n in (num_sequences, num_sequences + 1, num_sequences + total, 2, total)
    )
    survival, ordered = (empty(confidence, torch.float32, total) for _ in range(2))
    start(
        schedule_kernel,
        plans.schedule(),
        (1,),
        *(confidence.contiguous(), num_drafts, budgets, step, seconds),
        *(verify_len, query_start, row_source, new_budgets, survival, ordered, rank_of),
        *(num_sequences, block_size),
    )
    return verify_len, query_start, row_source, new_budgets
