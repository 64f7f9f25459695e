"""Prompt look-up: propose what followed the last time the text ended like this. No model, no cache.

For every sequence an index maps each n-gram (min_match <= n <= max_match) to the place behind its most
recent occurrence. It grows by the new tokens of a step and is never rebuilt from the whole text unless the
sequence changed under it.

The defaults are for small models, which copy spans from their prompt (summaries, code edits) and fall into
loops: a 3-token match already says something there, 8 tokens say as much as any more would, and a block of
8 rows costs little more than one. A short match gets a short proposal, and a look-up that was wrong about
the next token raises the match wanted by one (a right one lowers it by two), so that text without
repetition soon pays next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.drafters.interface import DraftBlock, DraftInput
from dspark.errors import ConfigError
from dspark.executors.interface import Float32, Int32

__all__ = ["NgramDrafter"]

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that the key of a window is one-to-one in its oldest token
_MASK = (1 << 64) - 1
_BULK = 32  # more new tokens than this are indexed with numpy


@dataclass(slots=True)
class _Index:
    """One sequence: `places[key]` is the position behind the last n-gram of that key ending before
    `num_indexed`.
    """

    places: dict[int, int] = field(default_factory=dict)
    num_indexed: int = 0
    tail: list[int] = field(default_factory=list)  # last indexed tokens: shows another text
    wanted: int = 0  # shortest match that may propose now
    proposed_at: int = -1  # length of the text at the last look-up that found something, -1 = judged
    proposed_first: int = -1  # the token it expected there


class NgramDrafter:
    """Proposes the continuation of the longest suffix that occurred before; a `Drafter`.

    Among equally long matches the most recent wins. A continuation that reaches the end of the text goes on
    with the proposal itself, so a loop of any period is continued for a whole block. A match of n tokens
    proposes at most 2 * (n - 1) tokens.

    Arguments:
        block_size: most drafts of one proposal.
        min_match: shortest suffix that counts.
        max_match: longest suffix that is looked for.

    Raises:
        ConfigError: sizes out of order.
    """

    name = "ngram"
    feature_layer_ids: tuple[int, ...] = ()

    def __init__(self, *, block_size: int = 8, min_match: int = 3, max_match: int = 8) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size: must be at least 1, got {block_size}")
        if not 1 <= min_match <= max_match:
            raise ConfigError(f"min_match: must be from 1 to max_match {max_match}, got {min_match}")
        self.block_size = block_size
        self.min_match = min_match
        self.max_match = max_match
        self._indexes: dict[int, _Index] = {}

    def allocate_cache(self, *, num_pages: int, page_size: int) -> None:
        """Allocate nothing."""

    def cache_page_bytes(self, page_size: int) -> int:  # noqa: ARG002
        """Return 0."""
        return 0

    def observe(self, *, features: Float32, positions: Int32, slots: Int32) -> None:
        """Look at nothing: tokens come with `propose`."""

    def release(self, sequence_id: int) -> None:
        """Drop the index of a sequence that ended."""
        self._indexes.pop(sequence_id, None)

    def propose(self, inputs: Sequence[DraftInput]) -> DraftBlock:
        """Look up every sequence; time goes with the new tokens, not with the text."""
        block = DraftBlock.empty(len(inputs), self.block_size)
        for row, item in enumerate(inputs):
            if item.max_drafts <= 0:
                continue
            proposal = self._propose_one(item)
            block.tokens[row, : len(proposal)] = proposal
            block.num_tokens[row] = len(proposal)
        return block

    def _propose_one(self, item: DraftInput) -> list[int]:
        tokens = item.token_ids
        index = self._index_of(item.sequence_id, tokens)
        self._judge(index, tokens)
        self._extend(index, tokens, len(tokens) - 1)
        place, match_len = self._look_up(index, tokens)
        if not match_len:
            return []
        # Judged later also when it is held back: that is how a text that begins to repeat itself is noticed.
        index.proposed_at, index.proposed_first = len(tokens), tokens[place]
        if match_len < index.wanted:
            return []
        count = min(self.block_size, item.max_drafts, max(2 * (match_len - 1), 1))
        proposal = list(tokens[place : place + count])
        while len(proposal) < count:  # the text's own end: go on with what was just proposed
            proposal.append(proposal[len(proposal) - (len(tokens) - place)])
        return proposal

    def _index_of(self, sequence_id: int, tokens: Sequence[int]) -> _Index:
        index = self._indexes.get(sequence_id)
        if index is not None:
            start = index.num_indexed - len(index.tail)
            if index.num_indexed < len(tokens) and list(tokens[start : index.num_indexed]) == index.tail:
                return index
        index = self._indexes[sequence_id] = _Index(wanted=self.min_match)
        return index

    def _judge(self, index: _Index, tokens: Sequence[int]) -> None:
        """Ask for a longer match after a wrong first token, for a shorter one after a right one."""
        if 0 <= index.proposed_at < len(tokens):
            right = tokens[index.proposed_at] == index.proposed_first
            wanted = index.wanted - 2 if right else index.wanted + 1
            index.wanted = min(max(wanted, self.min_match), self.max_match)
            index.proposed_at = -1

    def _extend(self, index: _Index, tokens: Sequence[int], end: int) -> None:
        """Index every n-gram that ends before position `end`; what follows each of them is known."""
        start = index.num_indexed
        if end <= start:
            return
        if end - start > _BULK:
            self._extend_many(index, tokens, start, end)
        else:
            places, shortest = index.places, self.min_match
            for last in range(start, end):
                key = 1
                for n in range(1, min(self.max_match, last + 1) + 1):
                    key = (key * _MULTIPLIER + tokens[last - n + 1]) & _MASK
                    if n >= shortest:
                        places[key] = last + 1
        index.num_indexed = end
        index.tail = list(tokens[max(end - self.max_match, 0) : end])

    def _extend_many(self, index: _Index, tokens: Sequence[int], start: int, end: int) -> None:
        """Do the same for many positions at once: the keys of one n for all positions, then the next n."""
        first = max(start - self.max_match + 1, 0)
        window = np.array(tokens[first:end], np.uint64)
        lasts = np.arange(start, end)
        keys = np.ones(end - start, np.uint64)
        for n in range(1, self.max_match + 1):
            inside = lasts - n + 1 >= 0
            lasts, keys = lasts[inside], keys[inside]
            keys = keys * np.uint64(_MULTIPLIER) + window[lasts - n + 1 - first]
            if n >= self.min_match:
                index.places.update(zip(keys.tolist(), (lasts + 1).tolist(), strict=True))

    def _look_up(self, index: _Index, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the place behind the best earlier occurrence of the text's end and the length of the
        match, or (0, 0).
        """
        suffix = list(tokens[-self.max_match :])
        suffix.reverse()
        found, key = (0, 0), 1
        for n, token in enumerate(suffix, start=1):
            key = (key * _MULTIPLIER + token) & _MASK
            if n < self.min_match:
                continue
            place = index.places.get(key)
            if place is None:
                break  # a longer match would contain this one
            if list(tokens[place - n : place])[::-1] == suffix[:n]:
                found = (place, n)
        return found
