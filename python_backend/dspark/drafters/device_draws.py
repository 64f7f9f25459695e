"""Blocks whose drafts a device draws: who may have them, and what verification is told of them.

A device knows temperature, top-k, top-p, min-p and the noise of a seed. What looks at the text (penalties, bad words,
guides, a minimum length) is the host's: blocks with such a request are drawn here. What drafts were drawn from may stay
on the device, where the target verifies them; it is copied when somebody here looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.executors.interface import DraftBatch, Float32, Int32
from dspark.request import SamplingParams
from dspark.sampling.distribution import Distribution
from dspark.sampling.transforms import TokenSampler

__all__ = [
    "DRAWS",
    "BlockDraws",
    "KeptProbs",
    "KeptRow",
    "SampledBlock",
    "SampledBlockExecutor",
    "block_of",
    "drawn_block",
    "join_blocks",
]

DRAWS = (
    "seeds",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "coupled",
)  # what an engine is told of `BlockDraws`


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
    def arg_max(cls, num_blocks: int) -> BlockDraws:
        """Return how blocks of likeliest tokens are drawn."""
        zeros, reals = np.zeros(num_blocks, np.int32), np.zeros(num_blocks, np.float32)
        return cls(
            seeds=zeros.astype(np.int64),
            temperature=reals,
            top_k=zeros,
            top_p=reals + 1,
            min_p=reals,
            coupled=zeros,
        )

    @classmethod
    def of(cls, samplers: Iterable[TokenSampler]) -> BlockDraws:
        samplers = tuple(samplers)
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


class KeptProbs:
    """q of the blocks of one call, left on the device [R, G, Vd] until the drafter runs again.

    Arguments:
        fetch: copies them to the host.
        block_size: G.
    """

    def __init__(self, fetch: Callable[[], Float32], *, block_size: int) -> None:
        self.block_size = block_size
        self._fetch = fetch
        self._host: Float32 | None = None

    @property
    def on_device(self) -> bool:
        """Whether they are still there, and nobody on the host has asked for them."""
        return self._host is None

    def host(self) -> Float32:
        """Return a copy [R, G, Vd]."""
        if self._host is None:
            self._host = self._fetch()
        return self._host


class KeptRow(Sequence["Distribution | None"]):
    """q of the drafts of one sequence, on the device until one is looked at.

    Arguments:
        probs: of all sequences of the call.
        row: this sequence's.
        count: drafts.
        draft_to_target: as for `drawn_block`.
    """

    def __init__(self, probs: KeptProbs, row: int, count: int, draft_to_target: Int32 | None) -> None:
        self.probs, self.row = probs, row
        self._count, self._map = count, draft_to_target

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Distribution | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Distribution | None]: ...
    def __getitem__(self, at: int | slice) -> Distribution | Sequence[Distribution | None] | None:
        rows = self.probs.host()[self.row, : self._count]
        if isinstance(at, slice):
            return tuple(_distribution(row, self._map) for row in rows[at])
        return _distribution(rows[at], self._map)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBlock:
    """What was drawn, and from what."""

    tokens: Int32  # [R, G] target token ids, undefined past num_tokens
    num_tokens: Int32  # [R]
    draft_probs: Float32 | KeptProbs | None  # [R, G, Vd] q_k; undefined at temperature 0 and past num_tokens
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
    draws = BlockDraws.of(item.sampler for item in inputs)
    drawn = executor.draft_sampled(batch, num_drafts=num_drafts, draws=draws)
    return block_of(drawn, inputs, draft_to_target)


def block_of(drawn: SampledBlock, inputs: Sequence[DraftInput], draft_to_target: Int32 | None) -> DraftBlock:
    """Return what a device drew as a block of these sequences."""
    distributions: tuple[Sequence[Distribution | None], ...] = drawn.distributions or tuple(
        (None,) * int(count)
        if item.sampler.params.greedy
        else _row_of(drawn.draft_probs, row, int(count), draft_to_target)
        for row, (item, count) in enumerate(zip(inputs, drawn.num_tokens, strict=True))
    )
    return DraftBlock(
        tokens=drawn.tokens,
        num_tokens=drawn.num_tokens,
        distributions=distributions,
        confidence_logits=drawn.confidence_logits,
    )


def _row_of(
    probs: Float32 | KeptProbs | None, row: int, count: int, draft_to_target: Int32 | None
) -> Sequence[Distribution | None]:
    assert probs is not None, "an executor tells q in one of two forms"
    if isinstance(probs, KeptProbs):
        return KeptRow(probs, row, count, draft_to_target)
    return tuple(_distribution(one, draft_to_target) for one in probs[row, :count])


def join_blocks(parts: Sequence[tuple[Sequence[int], DraftBlock]], num_sequences: int) -> DraftBlock:
    """Put blocks of disjoint rows together; every row has one."""
    width = parts[0][1].tokens.shape[1]
    whole = DraftBlock.empty(num_sequences, width)
    rated: Float32 | None = None
    distributions: list[Sequence[Distribution | None]] = [()] * num_sequences
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
