"""Plain version of the `schedule` op: which drafts the target verifies, without a look at the host.

    survival -> order -> verify lengths of an earlier budget -> rows of the ragged pass, and the budget for
    later

The number of drafts comes from the confidences of two steps earlier (a double buffer that stays on the
device), which ones they are from the confidences at hand; so the choice is lossless and nothing has to be
read back. Rows of drafts that were cut off are not in the pass at all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ScheduleOutput", "schedule"]


class ScheduleOutput(NamedTuple):
    """T = R + number of verified drafts; arrays over rows are as long as they can get, R * (1 + G)."""

    verify_len: Tensor  # [R] int32
    query_start: Tensor  # [R+1] int32, rows of sequence i are query_start[i] : query_start[i+1]
    row_source: (
        Tensor  # [R * (1 + G)] int32, index into [R, 1 + G] (anchor, drafts) of every row, -1 from T on
    )
    budgets: Tensor  # [2] int32, the double buffer after this step


def schedule(
    confidence: Tensor, num_drafts: Tensor, budgets: Tensor, step: Tensor | int, seconds: Tensor
) -> ScheduleOutput:
    """Choose verify lengths with the lagged rule.

    Arguments:
        confidence: [R, G] float32 calibrated c_k; NaN ends a block.
        num_drafts: [R] int32; negative = padding, a sequence without rows.
        budgets: [2] int32, what steps t-2 and t-1 found best, at t % 2 and (t+1) % 2. Negative = nothing
            yet: no draft
            is verified.
        step: t, a number or a scalar tensor.
        seconds: [R * G + 1] float32 or float64, seconds of the whole step with 0, 1, ... drafts.

    Returns:
        See `ScheduleOutput`. Among equal survivals the earlier position, then the earlier sequence, comes
        first.
    """
    num_sequences, block_size = confidence.shape
    device = confidence.device
    total = num_sequences * block_size
    position = torch.arange(block_size, device=device)
    usable = (position < num_drafts[:, None]) & (confidence > 0)
    c = torch.where(usable, confidence, torch.zeros_like(confidence))
    survival = c.clone()
    for k in range(1, block_size):  # left to right, as the kernel multiplies
        survival[:, k] = survival[:, k - 1] * c[:, k]

    # One integer per candidate: the bits of a float32 >= 0 rise with its value; the position-major index breaks ties.
    flat = survival.T.contiguous().reshape(-1)
    index = torch.arange(total, device=device)
    keys = (0xFFFFFFFF - flat.view(torch.int32).to(torch.int64)) * 2**31 + index
    order = torch.sort(keys).values % 2**31  # [R*G] position-major indices, best first
    ordered = flat[order]
    alive = ordered > 0

    slot = int(step) % 2
    budget = budgets[slot].clamp(min=0).to(torch.int64)
    taken = alive & (torch.arange(total, device=device) < budget)
    verify_len = torch.zeros(num_sequences, dtype=torch.int32, device=device)
    verify_len.index_add_(0, order % num_sequences, taken.to(torch.int32))

    tokens = num_sequences + torch.cat(
        [ordered.new_zeros(1, dtype=torch.float64), ordered.double().cumsum(0)]
    )
    theta = tokens / seconds.double()
    theta[1:] = torch.where(alive, theta[1:], torch.full_like(theta[1:], -1.0))
    new_budgets = budgets.clone()
    new_budgets[slot] = theta.argmax().to(torch.int32)

    rows = torch.where(num_drafts < 0, 0, 1 + verify_len)
    query_start = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
    query_start[1:] = rows.cumsum(0)
    column = torch.arange(1 + block_size, device=device)
    kept = column < rows[:, None]  # [R, 1 + G]
    at = query_start[:-1, None] + column
    row_source = torch.full((num_sequences * (1 + block_size),), -1, dtype=torch.int32, device=device)
    source = torch.arange(num_sequences * (1 + block_size), device=device, dtype=torch.int32).view_as(kept)
    row_source[at[kept].long()] = source[kept]
    return ScheduleOutput(verify_len, query_start, row_source, new_budgets)
