"""The contract between the engine and whatever runs the models (design.md, sections 4 and 6).

Everything crosses as numpy arrays on the host. An executor owns its weights and its paged caches and knows nothing of
requests, sampling or scheduling. Target and drafter caches share page ids: row i of a sequence lives in the same slot
of both, so one page table serves both and a reused page brings the drafter's context with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dspark.models.config import DrafterConfig, TargetConfig

__all__ = [
    "BlockDrafterExecutor",
    "BlockOutput",
    "CacheMover",
    "DraftBatch",
    "Float32",
    "Int32",
    "StepBatch",
    "TargetExecutor",
    "TargetOutput",
    "Verified",
]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """All rows of all sequences of one target pass, flattened: T rows of R sequences.

    Prefill chunks, single decoding rows and drafted chains or trees are all rows of this one call. Row t of sequence
    i sees the `context_len[i]` cached tokens and those of its own sequence's rows that `ancestors` names (without
    it: itself and the rows before it).
    """

    tokens: Int32  # [T] token ids
    positions: Int32  # [T] absolute positions, used by RoPE
    query_start: Int32  # [R+1] rows of sequence i are query_start[i] : query_start[i+1]
    context_len: Int32  # [R] tokens already in the cache
    page_table: Int32  # [R, max_pages] page ids; entries past a sequence's last page are -1
    slots: Int32  # [T] cache slot (page * page_size + offset) that each row's K/V is written to
    logit_rows: Int32  # [M] rows whose logits are needed, ascending
    ancestors: Int32 | None = (
        None  # [T, W] bit masks over the sequence's own rows (bit j = row j), None for chains
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What the executor's own verification of chains found; the path is the chain's first `accepted` drafts."""

    accepted: Int32  # [R] drafts
    next_token: (
        Int32  # [R] the target's token behind them; -1 for a row that is not finite, and where there are none
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """What a target pass gives back. `argmax` takes the lowest id among equals.

    Where the executor verified itself, logits and arg-max stayed where they were: both have no rows then.
    """

    logits: Float32  # [M, V]
    argmax: Int32  # [M]
    finite: npt.NDArray[np.bool_]  # [M] False where a row holds NaN or infinity
    features: Float32 | None  # [T, m*d] hidden states after the feature layers, None when there are none
    verified: Verified | None = None


class TargetExecutor(Protocol):
    """Runs the target model. `feature_layer_ids` were fixed when it was made (-1 = the embedding output)."""

    config: TargetConfig
    dtype: str
    name: str
    feature_layer_ids: tuple[int, ...]

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate the paged K/V cache of every layer. Called once, before the first pass."""

    def cache_page_bytes(self, page_size: int) -> int:
        """Bytes that one page takes over all layers, K and V."""

    def forward(self, batch: StepBatch) -> TargetOutput:
        """Run one pass: write K/V of every row into its slot, return logits of `logit_rows` and all features."""

    def embedding_and_head(self) -> tuple[Float32, Float32]:
        """Return the input embedding [V, d] and the LM head [V, d] in float32 (the same array when tied)."""


@runtime_checkable
class CacheMover(Protocol):
    """What a target executor offers beside `TargetExecutor` where trees can be verified."""

    def move_cache(self, *, from_slots: Int32, to_slots: Int32) -> None:
        """Copy K/V of every layer from slot to slot [N], one after the other in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """One block for each of R sequences. The context of sequence i is its first `context_len[i]` positions."""

    anchors: Int32  # [R] token ids x0
    anchor_positions: Int32  # [R] absolute position of the anchor; slot k has position anchor + k
    context_len: Int32  # [R] context rows in the drafter's cache
    page_table: Int32  # [R, max_pages]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutput:
    """The parallel part of a block, before the sequential head."""

    base_logits: Float32  # [R, G, Vd] U_k over the draft vocabulary
    hidden: Float32  # [R, G, d] h_k, after the final norm


class BlockDrafterExecutor(Protocol):
    """Runs a DFlash / DSpark drafter: context cache, block pass, sequential head, confidence head."""

    config: DrafterConfig
    name: str
    greedy_confidence: (
        Float32 | None
    )  # [G, 3] weights of drafters/greedy_confidence.py; None: arg-max drafts are rated like drawn ones

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None: ...

    def cache_page_bytes(self, page_size: int) -> int: ...

    def append_context(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Project features [N, m*d] of committed rows and write their K/V of every layer into `slots`."""

    def draft(self, batch: DraftBatch) -> BlockOutput:
        """Run the block pass of every sequence."""

    def initial_state(self, num_sequences: int) -> Float32 | None:
        """Return s_0 [R, r] of the RNN head, None for the other heads."""

    def head_step(
        self, *, previous: Int32, hidden: Float32, state: Float32 | None
    ) -> tuple[Float32 | None, Float32 | None]:
        """Return the bias B_k [R, Vd] (None at rank 0) and the next state.

        Arguments:
            previous: [R] x_{k-1} in target token ids (the anchor for k = 1).
            hidden: [R, d] h_k.
            state: what the last step gave back.
        """

    def confidence_logits(self, *, previous: Int32, hidden: Float32) -> Float32 | None:
        """Return the logits of c_k [R], None without a confidence head. Shapes as for `head_step`."""
