"""Launcher of `block_sample`."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark_plugins.kernels import plans
from dspark_plugins.kernels.block_sample import block_sample_kernel
from dspark_plugins.ops.launchers.start import DTYPE_NAMES, empty, start

__all__ = ["launch_block_sample"]


def launch_block_sample(
    base_logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    num_drafts: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coupled: Tensor,
    markov_in: Tensor | None,
    markov_out: Tensor | None,
    mix_weight: Tensor | None,
    mix_bias: Tensor | None,
    confidence_weight: Tensor | None,
    confidence_bias: Tensor | None,
    greedy_confidence: Tensor | None,
    draft_to_target: Tensor | None,
    previous_rows: Tensor | None,
    *,
    num_programs: int | None = None,
    one_launch: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do what `dspark::block_sample` says.

    Arguments:
        num_programs: how many programs share the work; None = one per multiprocessor.
        one_launch: all phases in one cooperative launch, else one launch each.
    """
    num_blocks, block_size, vocab_size = base_logits.shape
    hidden_size, rank = hidden.shape[2], 0 if markov_in is None else markov_in.shape[1]
    head, confidence = _head(rank, mix_weight), _confidence(hidden_size, confidence_weight)
    if num_programs is None:
        num_programs = _multiprocessors(base_logits)
    variant = plans.block_sample(
        vocab_size=vocab_size,
        rank=rank,
        head=head,
        confidence=confidence,
        mapped=draft_to_target is not None,
        previous=previous_rows is not None,
        dtype=DTYPE_NAMES[base_logits.dtype],
        weight_dtype=DTYPE_NAMES[hidden.dtype],
        cooperative=one_launch,
    )
    pairs, tiles = num_blocks * block_size, plans.cdiv(vocab_size, plans.VOCABULARY_TILE)

    def floats(*shape: int) -> Tensor:
        return empty(base_logits, torch.float32, *shape)

    def ints(*shape: int) -> Tensor:
        return empty(base_logits, torch.int32, *shape)

    tokens, num_tokens = ints(num_blocks, block_size), ints(num_blocks)
    probs, rated = floats(num_blocks, block_size, vocab_size), floats(num_blocks, block_size)
    scratch = (
        floats(pairs, rank * (3 if head == 3 else 1)),
        *(floats(num_blocks, rank), floats(num_blocks, rank)),
        *(floats(num_blocks, tiles, 3), ints(num_blocks, tiles, 2), floats(pairs, 3), ints(pairs, 2)),
        torch.zeros(1, dtype=torch.int32, device=base_logits.device),
    )
    weight, integer = hidden, tokens  # stand in for what this form of the kernel does not read
    arguments: tuple[Tensor | int, ...] = (
        *(base_logits.contiguous(), hidden.contiguous(), anchors, num_drafts, positions, seeds),
        *(temperature, top_k, top_p, min_p, coupled),
        *(
            weight if x is None else x
            for x in (markov_in, markov_out, mix_weight, mix_bias, confidence_weight)
        ),
        *(rated if x is None else x for x in (confidence_bias, greedy_confidence)),
        *(integer if x is None else x for x in (draft_to_target, previous_rows)),
        *(tokens, num_tokens, probs, rated, *scratch),
        *(num_blocks, block_size, vocab_size, hidden_size, tiles),
    )
    phases = plans.num_phases(block_size)
    steps = [(0, phases)] if one_launch else [(phase, phase + 1) for phase in range(phases)]
    for first, last in steps if num_blocks else ():
        start(block_sample_kernel, variant, (num_programs,), *arguments, first, last)
    return tokens, num_tokens, probs, rated


def _head(rank: int, mix_weight: Tensor | None) -> int:
    if rank == 0:
        return 0
    if mix_weight is None:
        return 1
    return 2 if len(mix_weight) == rank else 3


def _confidence(hidden_size: int, weight: Tensor | None) -> int:
    if weight is None:
        return 0
    return 1 if len(weight) == hidden_size else 2


def _multiprocessors(like: Tensor) -> int:
    """Return how many programs are surely resident at once."""
    if not like.is_cuda:
        return 1
    return int(torch.cuda.get_device_properties(like.device).multi_processor_count)
