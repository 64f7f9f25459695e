"""Which text a drafter's cache holds: what was written to each slot, and behind what.

A drafter that computes rows of its own accord shares page ids with the target, but not its times: pages that a prompt
found again may never have been computed here, a preempted sequence's pages may have changed hands, and drafts that were
rejected leave rows of a text that never came to be. So every page remembers the tokens of its rows and a digest of the
text before it; a row counts for a sequence when both are the sequence's own. A digest that met by chance would cost
drafts, never an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.executors.interface import Int32

__all__ = ["WrittenText"]

_NOTHING = -1  # no token
_ROOT = 1  # digest of the empty text; 0 stands for none


class WrittenText:
    """The text in a paged cache of `num_pages` pages of `page_size` slots."""

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._tokens = np.full((num_pages, page_size), _NOTHING, np.int32)
        self._before = np.zeros(num_pages, np.int64)  # digest of the text before the page
        self._whole = np.zeros(
            num_pages, np.int64
        )  # digest of the text to its end, 0 unless all of it is there
        self._digests: dict[int, list[int]] = {}  # by sequence: of its first 0, 1, 2, ... pages

    def held(self, sequence_id: int, token_ids: Sequence[int], pages: Int32) -> int:
        """Return how many leading tokens of a sequence have their rows in `pages`."""
        size, digests = self.page_size, self._digests_of(sequence_id, token_ids)
        full = min(len(digests) - 1, len(pages))
        same = self._whole[pages[:full]] == np.array(digests[1 : full + 1], np.int64)
        index = full if same.all() else int(same.argmin())
        while index < len(pages):
            count = self._rows_of(
                int(pages[index]), digests[index], token_ids[index * size : (index + 1) * size]
            )
            if count < size:
                return index * size + count
            index += 1
            self._whole[pages[index - 1]] = digests[index]
        return index * size

    def forget(self, slots: Int32) -> None:
        """Drop what is known of slots that are about to be written."""
        self._tokens.reshape(-1)[slots] = _NOTHING
        self._whole[np.unique(slots // self.page_size)] = 0

    def record(self, sequence_id: int, text: Sequence[int], pages: Int32, *, start: int) -> None:
        """Remember that the rows of text[start:] were written behind those of text[:start], which are held.

        Arguments:
            text: the sequence's tokens and, where their rows are worth keeping, its drafts.
        """
        size, digests = self.page_size, self._digests[sequence_id]
        digest = 0
        for index in range(start // size, -(-len(text) // size)):
            if index < len(digests):
                digest = digests[index]
            else:
                digest = _link(digest, text[(index - 1) * size : index * size])
            first, last = max(start, index * size), min(len(text), (index + 1) * size)
            row = self._tokens[pages[index]]
            row[first - index * size : last - index * size] = text[first:last]
            row[last - index * size :] = _NOTHING
            self._before[pages[index]] = digest

    def release(self, sequence_id: int) -> None:
        """Forget a sequence, not what it wrote."""
        self._digests.pop(sequence_id, None)

    def _rows_of(self, page: int, digest: int, tokens: Sequence[int]) -> int:
        """Return how many leading tokens [at most page_size] have their rows in a page."""
        if self._before[page] != digest:
            return 0
        same = self._tokens[page, : len(tokens)] == np.array(tokens, np.int32)
        return len(tokens) if same.all() else int(same.argmin())

    def _digests_of(self, sequence_id: int, token_ids: Sequence[int]) -> list[int]:
        digests = self._digests.setdefault(sequence_id, [_ROOT])
        for index in range(len(digests) - 1, len(token_ids) // self.page_size):
            digests.append(
                _link(digests[-1], token_ids[index * self.page_size : (index + 1) * self.page_size])
            )
        return digests


def _link(before: int, tokens: Sequence[int]) -> int:
    return hash((before, *tokens)) or _ROOT
