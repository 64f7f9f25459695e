"""The rows of a target pass that the device lays out: blocks it drafted, cut by `dspark::schedule`, then what the host
knows of.

Gathers over fixed shapes: nothing here waits for the device, leaves it, or depends on a value for its shape, so that it
can be part of a CUDA graph. In an engine the same gathers are nodes of the target's graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import relu

from dspark_plugins.ops.schedule import schedule

__all__ = ["FARTHEST", "calibrated", "scheduled_rows"]

FARTHEST = (
    30.0  # |x| beyond which a calibrated logit changes nothing any more, as in dspark.calibration.online
)


def calibrated(logits: Tensor, kinds: Tensor, calibration: Tensor) -> Tensor:
    """Return c_k [R, G] of confidence logits, by the map of `dspark.calibration.online`; NaN where one is not finite.

    Arguments:
        logits: [R, G] float32.
        kinds: [R] int32 kind of traffic; negative = padding, taken as 0.
        calibration: [kinds, G, 5] float32: scale, shift, a, b, d.
    """
    scale, shift, a, b, d = calibration[kinds.clamp(min=0).long()].unbind(-1)
    finite = logits.isfinite()
    x = (torch.where(finite, logits, 0.0) * scale + shift).clamp(-FARTHEST, FARTHEST)
    high = relu(x) + torch.log1p(torch.exp(-x.abs()))  # softplus(x); softplus(-x) = high - x
    confidence = torch.sigmoid(b * high + d - a * (high - x))
    return torch.where(finite, confidence, torch.nan)


def scheduled_rows(inputs: Mapping[str, Tensor], *, page_size: int) -> dict[str, Tensor]:
    """Return the tensors of a pass whose first D sequences were drafted on the device.

    D sequences come first, of which those of padding have no rows; the host's rows stand behind theirs. So the host
    gives its rows counted as if there were no others: `query_start`, `verify_start` and `logit_rows` are moved.

    Arguments:
        inputs: by the names of `target_bindings`: of the host's rows `tokens`, `positions`, `slots` [T], `query_start`,
            `verify_start` [R+1], `logit_rows`, `prob_rows` [M]; of all sequences `context_len`, `temperature` [R],
            `page_table` [R, P]; of the drafted ones `anchors`, `kinds` [D] (negative = padding), `calibration`,
            `budget` [1], and the drafter's `draft_tokens`, `confidence_logits` [D, G], `num_tokens` [D].
        page_size: tokens of a cache page.

    Returns:
        `tokens`, `positions`, `slots`, `query_start`, `verify_start`, `logit_rows`, `prob_rows` of the whole pass, and
        `verify_len` [D], 0 for padding.
    """
    kinds, drafts, table = inputs["kinds"], inputs["draft_tokens"], inputs["page_table"]
    num_drafted, block_size = drafts.shape
    num_rows, num_logits = len(inputs["tokens"]), len(inputs["logit_rows"])
    device = kinds.device
    num_drafts = torch.where(kinds < 0, -1, inputs["num_tokens"]).to(torch.int32)
    verify_len, starts, source, _ = schedule(
        calibrated(inputs["confidence_logits"], kinds, inputs["calibration"]),
        num_drafts,
        inputs["budget"].expand(2).contiguous(),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.ones(num_drafted * block_size + 1, device=device),
    )
    filled = starts[-1:].long()  # [1] rows of the drafted sequences
    at = torch.arange(num_rows, device=device)
    own = at < filled
    place = torch.where(own, source[at.clamp(max=len(source) - 1)], 0).long()
    owner, depth = place // (1 + block_size), place % (1 + block_size)
    drafted = drafts.reshape(-1)[(owner * block_size + depth - 1).clamp(min=0)]
    positions = inputs["context_len"][owner] + depth
    pages = table.reshape(-1)[owner * table.shape[1] + positions // page_size]
    q_rows = torch.where((depth > 0) & (inputs["temperature"][owner] > 0), owner * block_size + depth - 1, -1)
    own_rows = {
        "tokens": torch.where(depth == 0, inputs["anchors"][owner], drafted),
        "positions": positions,
        "slots": pages * page_size + positions % page_size,
    }
    rest = (at - filled).clamp(min=0)
    found = {name: torch.where(own, rows, inputs[name][rest]) for name, rows in own_rows.items()}

    logit_at = torch.arange(num_logits, device=device)
    logit_rest = (logit_at - filled).clamp(min=0)
    own_logits = logit_at < filled
    moved = (inputs["logit_rows"][logit_rest] + filled).clamp(max=num_rows - 1)
    found["logit_rows"] = torch.where(own_logits, logit_at, moved)
    of_logits = q_rows[logit_at.clamp(max=num_rows - 1)]
    found["prob_rows"] = torch.where(own_logits, of_logits, inputs["prob_rows"][logit_rest])

    begins = starts[torch.arange(len(inputs["query_start"]), device=device).clamp(max=num_drafted)]
    for name in ("query_start", "verify_start"):
        found[name] = inputs[name] + begins
    return {name: rows.to(torch.int32) for name, rows in found.items()} | {"verify_len": verify_len}
