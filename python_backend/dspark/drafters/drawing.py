"""Drafts drawn one position after another, each through its own request's sampler.

So the q that verification sees is the distribution a draft was really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.errors import NonFiniteError, RequestError
from dspark.executors.interface import Float32, Int32
from dspark.sampling.distribution import Distribution

__all__ = ["DrawnDrafts", "best_tokens", "draw_draft"]


def best_tokens(logits: Float32, draft_to_target: Int32 | None) -> Int32:
    """Return the arg-max token id of each row of logits [R, Vd], -1 where the row is not finite."""
    best = logits.argmax(axis=-1)  # NaN counts as the largest
    finite = np.isfinite(logits[np.arange(len(logits)), best])
    token_ids = best if draft_to_target is None else draft_to_target[best]
    return np.where(finite, token_ids, -1).astype(np.int32)


def draw_draft(
    item: DraftInput, logits: Float32, *, best: int, drafted: Sequence[int], draft_to_target: Int32 | None
) -> tuple[int, Distribution | None] | None:
    """Return the draft of one row and its q (None = one-hot), or None where the row allows no token.

    Arguments:
        logits: [Vd] of the row.
        best: its arg-max token id, -1 where it is not finite.
        drafted: the drafts before it.
        draft_to_target: [Vd] ascending target ids of a reduced draft vocabulary, None for the full one.
    """
    if best < 0:
        return None
    sampler = item.sampler
    try:
        if sampler.params.greedy:
            token = sampler.greedy_token(logits, drafted=drafted, token_ids=draft_to_target, argmax=best)
            return token, None
        distribution = sampler.distribution(logits, drafted=drafted, token_ids=draft_to_target)
    except (NonFiniteError, RequestError):
        # A reduced vocabulary may hold no token that the request allows; the target will find one.
        return None
    position = len(item.token_ids) + len(drafted)
    return sampler.draw(distribution, position=position, purpose="draft"), distribution


class DrawnDrafts:
    """The chains of R sequences while they grow.

    Arguments:
        num_sequences: R.
        block_size: G, the longest that a chain may become.
        draft_to_target: as for `draw_draft`.
    """

    def __init__(self, num_sequences: int, block_size: int, *, draft_to_target: Int32 | None = None) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self._drawn: list[list[Distribution | None]] = [[] for _ in range(num_sequences)]
        self._block_size, self._draft_to_target = block_size, draft_to_target

    def __getitem__(self, row: int) -> list[int]:
        """Return what sequence `row` has drafted."""
        return self._tokens[row]

    def draw(self, row: int, item: DraftInput, logits: Float32, *, best: int) -> bool:
        """Draw the next draft of sequence `row` from logits [Vd]; False where the row allows no token."""
        drafted = self._tokens[row]
        pick = draw_draft(item, logits, best=best, drafted=drafted, draft_to_target=self._draft_to_target)
        if pick is None:
            return False
        drafted.append(pick[0])
        self._drawn[row].append(pick[1])
        return True

    def block(self) -> DraftBlock:
        """Return all of it, without confidences."""
        tokens = np.zeros((len(self._tokens), self._block_size), np.int32)
        for row, drafted in enumerate(self._tokens):
            tokens[row, : len(drafted)] = drafted
        one_hot = all(distribution is None for drawn in self._drawn for distribution in drawn)
        lengths: npt.NDArray[np.int32] = np.array([len(drafted) for drafted in self._tokens], np.int32)
        return DraftBlock(
            tokens=tokens,
            num_tokens=lengths,
            distributions=None if one_hot else tuple(tuple(drawn) for drawn in self._drawn),
            confidence_logits=None,
        )
