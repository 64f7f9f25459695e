"""One packed training batch: ragged contexts, many blocks per sequence, nothing padded.

What must hold is checked once, where the batch is made; the model and the loss rely on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Example", "PackedBatch", "choose_anchors", "pack"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One answered prompt with what the target saw on the way. N tokens, the first `prompt_len` are the
    prompt.

    Row i belongs to token i; the last token was never fed to the target, so there are N - 1 rows.
    `target_hidden` is the target's final-norm output of the rows that predict answer tokens: row j is
    position prompt_len - 1 + j.
    """

    tokens: Int64  # [N]
    prompt_len: int
    features: torch.Tensor  # [N-1, m*d]
    target_hidden: torch.Tensor  # [N-prompt_len, d]
    target_lse: torch.Tensor  # [N-prompt_len] float32, log-sum-exp of the target's logits over all of V
    target_argmax: torch.Tensor  # [N-prompt_len] int64, the target's greedy token


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """S sequences with C context rows and B blocks of G slots; blocks are sorted by sequence, then by anchor.

    Slot k of a block predicts the token behind position anchor + k; its label is valid when that token is
    part of the answer. `target_row` says which row of `target_hidden` holds the target's prediction for the
    slot.
    """

    features: torch.Tensor  # [C, m*d]
    context_positions: torch.Tensor  # [C] int64
    context_start: tuple[int, ...]  # [S+1] rows of each sequence
    anchor_tokens: torch.Tensor  # [B] int64
    anchor_positions: torch.Tensor  # [B] int64; the block sees the context rows before this position
    block_start: tuple[int, ...]  # [S+1] blocks of each sequence
    previous: torch.Tensor  # [B, G] int64, x_{k-1} in target ids
    labels: torch.Tensor  # [B, G] int64 in target ids, undefined where not valid
    valid: torch.Tensor  # [B, G] bool
    target_row: torch.Tensor  # [B, G] int64, undefined where not valid
    target_hidden: torch.Tensor  # [U, d]
    target_lse: torch.Tensor  # [U] float32
    target_argmax: torch.Tensor  # [U] int64

    @property
    def num_blocks(self) -> int:
        return int(self.anchor_tokens.shape[0])

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch with every tensor on `device`."""
        tensors: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), torch.Tensor)
        }
        return replace(self, **tensors)


def choose_anchors(rng: np.random.Generator, *, prompt_len: int, num_tokens: int, num_anchors: int) -> Int64:
    """Return ascending anchor positions, drawn without repetition from those that serving can meet.

    An anchor is an answer token (the first answer token comes from prefill) with at least one token behind
    it.
    """
    possible = num_tokens - 1 - prompt_len
    if possible <= 0:
        return np.zeros(0, np.int64)
    if num_anchors >= possible:
        return np.arange(prompt_len, num_tokens - 1, dtype=np.int64)
    drawn = rng.choice(possible, size=num_anchors, replace=False)
    return np.sort(drawn).astype(np.int64) + prompt_len


def pack(examples: list[Example], anchors: list[Int64], *, block_size: int) -> PackedBatch:
    """Pack examples and their anchors into one batch. Examples without anchors are left out.

    Arguments:
        examples: S sequences.
        anchors: for each its anchor positions, ascending, each in [prompt_len, N-2].
        block_size: G.
    """
    features, positions, context_start = [], [], [0]
    tokens_at, positions_at, block_start = [], [], [0]
    previous, labels, valid, rows = [], [], [], []
    hidden, lse, argmax = [], [], []
    row_offset = 0
    slot = np.arange(block_size)
    for example, at in zip(examples, anchors, strict=True):
        if len(at) == 0:
            continue
        num_tokens = len(example.tokens)
        assert example.prompt_len <= at[0] and at[-1] <= num_tokens - 2, (
            "anchors must be answer tokens with a successor"
        )
        context_len = int(at[-1])  # rows before the last anchor; later ones are seen by nobody
        features.append(example.features[:context_len])
        positions.append(torch.arange(context_len))
        context_start.append(context_start[-1] + context_len)
        tokens_at.append(example.tokens[at])
        positions_at.append(at)
        block_start.append(block_start[-1] + len(at))
        here = at[:, None] + slot[None, :]  # [A, G] position of x_{k-1}
        inside = here <= num_tokens - 2
        clipped = np.minimum(here, num_tokens - 2)
        previous.append(example.tokens[clipped])
        labels.append(example.tokens[clipped + 1])
        valid.append(inside)
        rows.append(clipped - (example.prompt_len - 1) + row_offset)
        hidden.append(example.target_hidden)
        lse.append(example.target_lse)
        argmax.append(example.target_argmax)
        row_offset += example.target_hidden.shape[0]
    assert features, "a batch needs at least one anchor"
    return PackedBatch(
        features=torch.cat(features),
        context_positions=torch.cat(positions),
        context_start=tuple(context_start),
        anchor_tokens=torch.from_numpy(np.concatenate(tokens_at)),
        anchor_positions=torch.from_numpy(np.concatenate(positions_at)),
        block_start=tuple(block_start),
        previous=torch.from_numpy(np.concatenate(previous)),
        labels=torch.from_numpy(np.concatenate(labels)),
        valid=torch.from_numpy(np.concatenate(valid)),
        target_row=torch.from_numpy(np.concatenate(rows)),
        target_hidden=torch.cat(hidden),
        target_lse=torch.cat(lse),
        target_argmax=torch.cat(argmax),
    )
