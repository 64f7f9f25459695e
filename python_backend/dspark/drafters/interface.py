"""The contract between the engine and every drafter: four verbs, two value objects.

    allocate  once: caches beside the target's, same pages
    propose   one block for each sequence that may draft
    observe   features of newly committed rows (drafters with `feature_layer_ids` only)
    release   a sequence ended; what was remembered under its id goes

A drafter never commits, never verifies and never sees the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dspark.executors.interface import DraftBatch, Float32, Int32
from dspark.sampling.distribution import Distribution
from dspark.sampling.transforms import TokenSampler

__all__ = [
    "DraftBlock",
    "DraftInput",
    "DraftLauncher",
    "DraftTree",
    "DraftWriter",
    "Drafter",
    "GreedyBlock",
    "GreedyBlockExecutor",
    "TreeExecutor",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInput:
    """What a drafter may know of one sequence.

    `token_ids` is prompt + output, its last entry the anchor, whose position is len(token_ids) - 1. `sampler`
    is the request's own: drafts are drawn through it, so that q is the distribution they were really drawn
    from.
    """

    sequence_id: int
    token_ids: Sequence[int]
    max_drafts: int  # no more are wanted (cap, length left)
    sampler: TokenSampler
    pages: Int32  # page ids, in order of position
    may_branch: bool = True  # a drafter of trees may draft one


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """Drafts of R sequences that branch: up to N nodes each, parents before their children.

    A node says: if the answer goes on as its path says up to its parent, then with `tokens`. What is said of nodes
    past `num_nodes` means nothing.
    """

    tokens: Int32  # [R, N] target token ids
    parents: Int32  # [R, N] node before each, -1 = the anchor
    depths: Int32  # [R, N] 0 = right behind the anchor
    ranks: Int32  # [R, N] place among its siblings, 0 = the likeliest
    log_q: Float32  # [R, N] logarithm of the drafter's q of the token, given its path
    rating: (
        Float32 | None
    )  # [R, N] confidence logit of the slot that it and its siblings fill, None without a head
    num_nodes: Int32  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """Up to G drafts for each of R sequences: chains, or trees where `tree` is set.

    `distributions[i][k]` is q_k of sequence i, None for a token that was looked up or is an arg-max
    (one-hot). The nodes of a tree are all one-hot: what the target draws is looked for among them.
    """

    tokens: Int32  # [R, G], undefined past num_tokens
    num_tokens: Int32  # [R]
    distributions: tuple[Sequence[Distribution | None], ...] | None  # None = all one-hot
    confidence_logits: Float32 | None  # [R, G], NaN where looked up, None without a confidence head
    looked_up: npt.NDArray[np.bool_] | None = (
        None  # [R] blocks that cost no drafter pass; None = none of them
    )
    tree: DraftTree | None = (
        None  # its tokens and num_nodes are this block's; looked-up rows are chains in it
    )

    @property
    def num_drafted(self) -> int:
        """Blocks that the drafter ran for."""
        drafted = self.num_tokens > 0
        return int(np.count_nonzero(drafted if self.looked_up is None else drafted & ~self.looked_up))

    @classmethod
    def empty(cls, num_sequences: int, block_size: int) -> DraftBlock:
        return cls(
            tokens=np.zeros((num_sequences, block_size), np.int32),
            num_tokens=np.zeros(num_sequences, np.int32),
            distributions=None,
            confidence_logits=None,
        )

    def confidence(self) -> npt.NDArray[np.float32] | None:
        """Return c_k = sigmoid(logit) [R, G], NaN where nothing rated the draft."""
        if self.confidence_logits is None:
            return None
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * self.confidence_logits.astype(np.float64))), np.float32)


class Drafter(Protocol):
    name: str
    block_size: int  # G, the most drafts of one step; 0 = never drafts
    feature_layer_ids: tuple[int, ...]  # target layers it wants features of, () for none

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None: ...

    def cache_page_bytes(self, page_size: int) -> int: ...

    def propose(self, inputs: Sequence[DraftInput]) -> DraftBlock: ...

    def observe(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Take the features [N, m*d] of rows whose tokens are now committed; called before the next
        `propose`."""

    def release(self, sequence_id: int) -> None:
        """Forget a sequence that ended. Preempted ones are kept; an id never seen is no error."""


@runtime_checkable
class DraftWriter(Protocol):
    """What a drafter says beside `Drafter` that writes rows of its drafts to the sequence's pages."""

    writes_drafts: bool  # True: pages for `max_drafts` drafts are held when it is asked


@runtime_checkable
class DraftLauncher(Protocol):
    """What a drafter offers beside `Drafter` whose blocks may be verified before anybody has seen them."""

    def can_launch(self, inputs: Sequence[DraftInput]) -> bool:
        """Return whether these blocks are all drafted, and drawn, in one call that can be started."""

    def launch(self, inputs: Sequence[DraftInput]) -> None:
        """Start what `propose` does, for chains; sequences that want no drafts have a place in the call, too."""

    def collect(self) -> tuple[DraftBlock, float]:
        """Wait for what was started; return it, and the seconds it took on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyBlock:
    """Blocks whose every draft is an arg-max, as one fused call gives them back."""

    tokens: Int32  # [R, G] target token ids, undefined past num_tokens
    num_tokens: Int32  # [R] drafts before the first non-finite logit, at most what was asked for
    confidence_logits: Float32 | None  # [R, G], None without a confidence head


@runtime_checkable
class GreedyBlockExecutor(Protocol):
    """What a block executor may offer beside `BlockDrafterExecutor`: the whole greedy block in one call.

    Logits then never leave the executor. `DSparkDrafter` uses it for steps where every request is plain
    greedy.
    """

    def draft_greedy(self, batch: DraftBatch, *, num_drafts: Int32) -> GreedyBlock:
        """Draft `num_drafts` [R] tokens for each sequence (none may be 0), ties to the lowest id."""


@runtime_checkable
class TreeExecutor(Protocol):
    """What a block executor may offer beside `BlockDrafterExecutor`: whole trees in one call."""

    makes_trees: bool  # False for heads whose state the last token does not hold

    def draft_tree(self, batch: DraftBatch, *, num_nodes: Int32, width: int, branch: int) -> DraftTree:
        """Grow a tree of up to `num_nodes` [R] nodes, all at least 1, out of one block of each sequence.

        Arguments:
            width: paths that are continued at each level.
            branch: children of each of them that are looked at.
        """
