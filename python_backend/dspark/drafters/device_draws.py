"""Blocks whose drafts a device draws: who may have them, and what verification is told of them.

A device knows temperature, top-k, top-p, min-p and the noise of a seed. What looks at the text (penalties, bad words,
guides, a minimum length) is the host's: blocks with such a request are drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.executors.interface import DraftBatch, Float32, Int32
from dspark.request import SamplingParams
from dspark.sampling.distribution import Distribution

__all__ = ["BlockDraws", "SampledBlock", "SampledBlockExecutor", "drawn_block", "join_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDraws:
    """How each of R blocks is drawn."""

    seeds: npt.NDArray[np.int64]  # [R] 64 bits of the request's seed
    temperature: Float32  # [R] 0 = arg-max
    top_k: Int32  # [R] 0 = all
    top_p: Float32  # [R]
    min_p: Float32  # [R]
    coupled: Int32  # [R] 1 = the noise that tokens own, 0 = one uniform number for each draft
    params: tuple[SamplingParams, ...] = ()  # [R] the same in double precision, for who computes in it

    @classmethod
    def of(cls, inputs: Sequence[DraftInput]) -> BlockDraws:
        samplers = [item.sampler for item in inputs]
        params = [sampler.params for sampler in samplers]

        def column(values: list[Any], kind: Any) -> npt.NDArray[Any]:
            return np.array(values, kind)

        return cls(
            seeds=column([sampler.seed % 2**64 for sampler in samplers], np.uint64).view(np.int64),
            temperature=column([0.0 if p.greedy else p.temperature for p in params], np.float32),
            top_k=column([p.top_k for p in params], np.int32),
            top_p=column([p.top_p for p in params], np.float32),
            min_p=column([p.min_p for p in params], np.float32),
            coupled=column([sampler.rule == "coupled" for sampler in samplers], np.int32),
            params=tuple(params),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBlock:
    """What was drawn, and from what."""

    tokens: Int32  # [R, G] target token ids, undefined past num_tokens
    num_tokens: Int32  # [R]
    draft_probs: Float32 | None  # [R, G, Vd] q_k; undefined at temperature 0 and past num_tokens
    confidence_logits: Float32 | None  # [R, G]
    distributions: tuple[tuple[Distribution | None, ...], ...] | None = (
        None  # in place of draft_probs; None = arg-max
    )


@runtime_checkable
class SampledBlockExecutor(Protocol):
    """An executor that draws on its device."""

    def draft_sampled(self, batch: DraftBatch, *, num_drafts: Int32, draws: BlockDraws) -> SampledBlock:
        """Draft whole blocks; `num_drafts` [R], each at least 1."""


def drawn_block(
    executor: object,
    inputs: Sequence[DraftInput],
    batch: DraftBatch,
    num_drafts: Int32,
    draft_to_target: Int32 | None,
) -> DraftBlock | None:
    """Return the block of sequences as a device drew it, None where this executor or a request leaves it to the host.

    Arguments:
        draft_to_target: [Vd] int32 ascending target ids of a reduced draft vocabulary, None for the full one.
    """
    if not isinstance(executor, SampledBlockExecutor) or any(item.sampler.alters(0) for item in inputs):
        return None
    drawn = executor.draft_sampled(batch, num_drafts=num_drafts, draws=BlockDraws.of(inputs))
    distributions = drawn.distributions or tuple(
        (None,) * int(count)
        if item.sampler.params.greedy
        else tuple(_distribution(row, draft_to_target) for row in probs[:count])
        for item, probs, count in zip(inputs, _given(drawn), drawn.num_tokens, strict=True)
    )
    return DraftBlock(
        tokens=drawn.tokens,
        num_tokens=drawn.num_tokens,
        distributions=distributions,
        confidence_logits=drawn.confidence_logits,
    )


def _given(drawn: SampledBlock) -> Float32:
    assert drawn.draft_probs is not None, "an executor tells q in one of two forms"
    return drawn.draft_probs


def join_blocks(parts: Sequence[tuple[Sequence[int], DraftBlock]], num_sequences: int) -> DraftBlock:
    """Put blocks of disjoint rows together; every row has one."""
    width = parts[0][1].tokens.shape[1]
    whole = DraftBlock.empty(num_sequences, width)
    rated: Float32 | None = None
    distributions: list[tuple[Distribution | None, ...]] = [()] * num_sequences
    for rows, block in parts:
        at = list(rows)
        whole.tokens[at], whole.num_tokens[at] = block.tokens, block.num_tokens
        if block.confidence_logits is not None:
            rated = np.zeros((num_sequences, width), np.float32) if rated is None else rated
            rated[at] = block.confidence_logits
        for index, row in enumerate(at):
            given = block.distributions
            distributions[row] = (None,) * width if given is None else given[index]
    one_hot = all(block.distributions is None for _, block in parts)
    return DraftBlock(
        tokens=whole.tokens,
        num_tokens=whole.num_tokens,
        distributions=None if one_hot else tuple(distributions),
        confidence_logits=rated,
    )


def _distribution(row: Float32, draft_to_target: Int32 | None) -> Distribution:
    """Return q of one draft from its row [Vd]."""
    kept = np.flatnonzero(row)
    if draft_to_target is None and len(kept) == len(row):
        return Distribution(None, row.astype(np.float64))
    token_ids = kept.astype(np.int32) if draft_to_target is None else draft_to_target[kept]
    return Distribution(token_ids, row[kept].astype(np.float64))
