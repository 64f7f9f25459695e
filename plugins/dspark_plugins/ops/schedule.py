"""`dspark::schedule`: verify lengths and the rows of the ragged pass, without a look at the host."""

# ruff: noqa: ARG001  (a fake op takes what the op takes)

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.reference.schedule import schedule as plain

__all__ = ["schedule"]


@torch.library.custom_op("dspark::schedule", mutates_args=(), device_types="cpu")
def schedule(
    confidence: Tensor, num_drafts: Tensor, budgets: Tensor, step: Tensor, seconds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose verify lengths with the lagged rule and compact the rows that are left.

    Arguments:
        confidence: [R, G] float32 calibrated c_k; NaN ends a block.
        num_drafts: [R] int32; negative = padding, a sequence without rows.
        budgets: [2] int32 what steps t-2 and t-1 found best, at t % 2 and (t+1) % 2; negative = nothing yet.
        step: [1] int32, t.
        seconds: [R * G + 1] float32 seconds of the whole step with 0, 1, ... drafts.

    Returns:
        verify_len: [R] int32.
        query_start: [R+1] int32, rows of sequence i are query_start[i] : query_start[i+1].
        row_source: [R * (1 + G)] int32 index into [R, 1 + G] (anchor, drafts) of every row, -1 behind the last.
        new_budgets: [2] int32, the double buffer after this step.
    """
    return plain(confidence, num_drafts, budgets, step, seconds)


@schedule.register_fake
def _(
    confidence: Tensor, num_drafts: Tensor, budgets: Tensor, step: Tensor, seconds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_sequences, block_size = confidence.shape
    return (
        num_drafts.new_empty((num_sequences,), dtype=torch.int32),
        num_drafts.new_empty((num_sequences + 1,), dtype=torch.int32),
        num_drafts.new_empty((num_sequences * (1 + block_size),), dtype=torch.int32),
        budgets.new_empty((2,), dtype=torch.int32),
    )


@schedule.register_kernel("cuda")
def _(
    confidence: Tensor, num_drafts: Tensor, budgets: Tensor, step: Tensor, seconds: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from dspark_plugins.ops.launchers.schedule import (
        launch_schedule,
    )  # the Triton language, where there is a GPU

    return launch_schedule(confidence, num_drafts, budgets, step, seconds)
