"""A drafter with a model that first looks whether the text repeats itself.

Where the text's end occurred before, what followed then is free and often right for a whole block (edits, quotes,
code): those sequences are not run through the drafter. All others are. The choice is made from the text alone, so
verification stays lossless.

Looked-up drafts carry NaN as confidence logit: nothing rated them, and the scheduler takes what earlier look-ups of the
same sequence showed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dspark.drafters.autoregressive import AutoregressiveDrafter
from dspark.drafters.dspark import DSparkDrafter
from dspark.drafters.interface import DraftBlock, DraftInput, DraftLauncher, DraftTree
from dspark.drafters.ngram import NgramDrafter
from dspark.executors.interface import Float32, Int32

Bool = npt.NDArray[np.bool_]

__all__ = ["LookupDrafter"]

_ENOUGH = 6  # looked-up tokens worth more than a drafted block: a match of 4 tokens or more (3 if G <= 4)


class LookupDrafter:
    """Look-up before drafting; a `Drafter` with the block size, caches and features of the one that has a model."""

    def __init__(self, drafter: DSparkDrafter | AutoregressiveDrafter) -> None:
        self.drafter = drafter
        self.name = f"{drafter.name}+ngram"
        self.block_size = drafter.block_size
        self.feature_layer_ids = drafter.feature_layer_ids
        self.writes_drafts = isinstance(drafter, AutoregressiveDrafter)
        self._lookup = NgramDrafter(block_size=drafter.block_size)
        self._enough = min(_ENOUGH, drafter.block_size)
        self._matched: tuple[Sequence[DraftInput], DraftBlock] | None = None

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate the context cache beside the target's."""
        self.drafter.allocate_cache(num_pages=num_pages, page_size=page_size)

    def cache_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers."""
        return self.drafter.cache_page_bytes(page_size)

    def observe(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Append the context of committed rows."""
        self.drafter.observe(features=features, positions=positions, slots=slots)

    def release(self, sequence_id: int) -> None:
        """Forget the sequence's index."""
        self._lookup.release(sequence_id)
        self.drafter.release(sequence_id)

    def propose(self, inputs: Sequence[DraftInput]) -> DraftBlock:
        """Return looked-up blocks where the match is long, drafted ones elsewhere.

        How long the match is does not depend on how many drafts are wanted: a short block is no reason to take a
        short match for the drafter's word.
        """
        wanted = np.array([item.max_drafts for item in inputs], np.int32)
        found = self._matches(inputs)
        looked_up = found.num_tokens >= self._enough
        if not looked_up.any():
            return self.drafter.propose(inputs)
        rest = [replace(i, max_drafts=0) if up else i for i, up in zip(inputs, looked_up, strict=True)]
        block = self.drafter.propose(rest)
        tokens = np.where(looked_up[:, None], found.tokens, block.tokens)
        num_tokens = np.where(looked_up, np.minimum(found.num_tokens, wanted), block.num_tokens)
        confidence = None
        if self.drafter.has_confidence:
            rated = block.confidence_logits
            confidence = np.zeros(tokens.shape, np.float32) if rated is None else rated.copy()
            confidence[looked_up] = np.nan
        distributions = block.distributions
        if distributions is not None:
            distributions = tuple(
                (None,) * int(num) if up else of_row
                for of_row, num, up in zip(distributions, num_tokens, looked_up, strict=True)
            )
        return DraftBlock(
            tokens=tokens.astype(np.int32),
            num_tokens=num_tokens.astype(np.int32),
            distributions=distributions,
            confidence_logits=confidence,
            looked_up=looked_up,
            tree=None if block.tree is None else _with_chains(block.tree, looked_up, tokens, num_tokens),
        )

    # Blocks that nobody waits for: those of the drafter, in steps in which nothing is looked up

    def can_launch(self, inputs: Sequence[DraftInput]) -> bool:
        """Return whether the drafter can start all of these and no match is long enough."""
        inner = self.drafter
        return (
            isinstance(inner, DraftLauncher)
            and inner.can_launch(inputs)
            and not (self._matches(inputs).num_tokens >= self._enough).any()
        )

    def launch(self, inputs: Sequence[DraftInput]) -> None:
        """Start the drafter."""
        assert isinstance(self.drafter, DraftLauncher)
        self.drafter.launch(inputs)

    def collect(self) -> tuple[DraftBlock, float]:
        """Wait for the drafter."""
        assert isinstance(self.drafter, DraftLauncher)
        return self.drafter.collect()

    def _matches(self, inputs: Sequence[DraftInput]) -> DraftBlock:
        """Return what repeats itself; a step that asks twice with the same list is answered once."""
        if self._matched is None or self._matched[0] is not inputs:
            found = self._lookup.propose(
                [replace(i, max_drafts=self.block_size) if i.max_drafts > 0 else i for i in inputs]
            )
            self._matched = (inputs, found)
        return self._matched[1]


def _with_chains(tree: DraftTree, looked_up: Bool, tokens: Int32, num_tokens: Int32) -> DraftTree:
    """Put looked-up chains into the rows of a tree that it has nothing in."""
    chain = np.arange(tokens.shape[1], dtype=np.int32)
    up = looked_up[:, None]
    return replace(
        tree,
        tokens=tokens.astype(np.int32),
        parents=np.where(up, chain - 1, tree.parents).astype(np.int32),
        depths=np.where(up, chain, tree.depths).astype(np.int32),
        num_nodes=num_tokens.astype(np.int32),
    )
