"""What the tokens so far do to the logits of the next one: masks, then penalties.

Committed tokens are counted as they come; drafted ones, which may still be rejected, are laid over the counts
of a single row. Knows nothing of temperature, noise or verification.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dspark.errors import RequestError
from dspark.request import Grammar, SamplingParams

__all__ = ["TokenHistory"]

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

_LARGEST = float(np.finfo(np.float32).max)


class TokenHistory:
    """Prompt and output of one request, and the logit transforms that depend on them.

    Order of the transforms: bad words, end tokens before `min_tokens` and what the grammar forbids are masked
    with -inf; repetition penalty over prompt + output + drafted (positive logits divided, others multiplied);
    frequency and presence penalty over output + drafted (counts times one, plus the other where there are
    any).
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Collection[int],
        grammar: Grammar | None = None,
    ) -> None:
        self.num_outputs = 0
        self.num_tokens = len(prompt_ids)  # prompt and output
        self._params = params
        self._vocab_size = vocab_size
        self._end_set = frozenset(end_ids)
        self._end_ids = np.array(sorted(end_ids), np.int32)
        self._banned = np.array([word[0] for word in params.bad_words_ids if len(word) == 1], np.int32)
        self._bad_words = tuple(word for word in params.bad_words_ids if len(word) > 1)
        self._tail: deque[int] = deque(maxlen=max((len(word) - 1 for word in self._bad_words), default=0))
        self._penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._grammar = grammar
        self._always_alters = self._penalised or bool(params.bad_words_ids) or grammar is not None
        # Distinct tokens and how often each was produced; the first `_size` entries count.
        self._size = 0
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        self._entry_of: dict[int, int] = {}
        if self._penalised:
            for token_id in dict.fromkeys(prompt_ids):
                self._entry(token_id)
        self._tail.extend(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append output tokens."""
        self.num_outputs += len(token_ids)
        self.num_tokens += len(token_ids)
        self._tail.extend(token_ids)
        if self._grammar is not None:
            self._grammar.commit(tuple(token for token in token_ids if token not in self._end_set))
        if self._penalised:
            for token_id in token_ids:
                entry = self._entry(token_id)  # may move the counts
                self._counts[entry] += 1

    def grammar_ends(self, drafted: Sequence[int]) -> bool:
        """Return whether nothing but the end can follow `drafted` uncommitted tokens."""
        if self._grammar is None or not self._grammar.may_end(tuple(drafted)):
            return False
        allowed = self._grammar.allowed(tuple(drafted))
        return allowed is not None and not allowed.any()

    def alters(self, num_drafted: int) -> bool:
        """Return whether the row behind `num_drafted` drafted tokens is changed by anything here."""
        return self._always_alters or self._ends_masked(num_drafted)

    def apply(self, logits: Float32, drafted: Sequence[int], entry_of_token: Int32 | None = None) -> Float32:
        """Return the changed copy of one row.

        Arguments:
            logits: [n] float32 of the whole vocabulary, or of a reduced one.
            drafted: uncommitted tokens between the history and this row.
            entry_of_token: [V] entry of `logits` that belongs to a token, -1 where there is none; None = the
                token id.

        Raises:
            RequestError: when the bans leave no token.
        """
        row = logits.copy()
        if self._grammar is not None:
            self._follow_grammar(row, drafted, entry_of_token)
        masked = self._masked_ids(drafted)
        if len(masked):
            row[_entries(masked, entry_of_token)[0]] = -np.inf
        if self._penalised:
            self._penalise(row, drafted, entry_of_token)
        if len(masked) and not (row > -np.inf).any() and (logits > -np.inf).any():
            raise RequestError(
                "bad_words", list(self._params.bad_words_ids), "words that leave a token to produce"
            )
        return row

    def _follow_grammar(self, row: Float32, drafted: Sequence[int], entry_of_token: Int32 | None) -> None:
        """Mask what the grammar forbids; a row behind drafts that break it, or behind its end, is left alone: what
        is drawn there is never committed. So is a reduced vocabulary without an allowed token.
        """
        assert self._grammar is not None
        drafted = tuple(drafted)
        allowed = self._grammar.allowed(drafted)
        if allowed is None:
            return
        if len(self._end_ids) and self._grammar.may_end(drafted):
            allowed = allowed.copy()
            allowed[self._end_ids] = True
        if entry_of_token is not None:
            entries = entry_of_token[np.flatnonzero(allowed)]
            allowed = np.zeros(len(row), np.bool_)
            allowed[entries[entries >= 0]] = True
        if allowed.any():
            row[~allowed] = -np.inf

    def _ends_masked(self, num_drafted: int) -> bool:
        return self.num_outputs + num_drafted < self._params.min_tokens and len(self._end_ids) > 0

    def _masked_ids(self, drafted: Sequence[int]) -> Int32:
        parts = [self._banned]
        if self._bad_words:
            recent = (*self._tail, *drafted)
            last = [
                word[-1] for word in self._bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1]
            ]
            parts.append(np.array(last, np.int32))
        if self._ends_masked(len(drafted)):
            parts.append(self._end_ids)
        return np.concatenate(parts)

    def _penalise(self, row: Float32, drafted: Sequence[int], entry_of_token: Int32 | None) -> None:
        ids, counts = self._with_drafted(drafted)
        entries, present = _entries(ids, entry_of_token)
        counts = counts[present]
        before = row[entries].astype(np.float64)
        penalty = self._params.repetition_penalty
        after = np.where(before > 0, before / penalty, before * penalty)
        after -= self._params.frequency_penalty * counts
        after -= self._params.presence_penalty * (counts > 0)
        row[entries] = np.where(np.isfinite(before), np.clip(after, -_LARGEST, _LARGEST), before)

    def _with_drafted(self, drafted: Iterable[int]) -> tuple[Int32, Int32]:
        """Return distinct tokens and their counts in the output, drafted tokens included."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        if not drafted:
            return ids, counts
        fresh: dict[int, int] = {}
        counts = counts.copy()
        for token_id in drafted:
            entry = self._entry_of.get(token_id)
            if entry is None:
                fresh[token_id] = fresh.get(token_id, 0) + 1
            else:
                counts[entry] += 1
        if not fresh:
            return ids, counts
        return (
            np.concatenate((ids, np.fromiter(fresh.keys(), np.int32, len(fresh)))),
            np.concatenate((counts, np.fromiter(fresh.values(), np.int32, len(fresh)))),
        )

    def _entry(self, token_id: int) -> int:
        entry = self._entry_of.get(token_id)
        if entry is None:
            entry = self._size
            if entry == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[entry] = token_id
            self._entry_of[token_id] = entry
            self._size += 1
        return entry


def _entries(
    ids: Int32, entry_of_token: Int32 | None
) -> tuple[npt.NDArray[np.int32], slice | npt.NDArray[np.bool_]]:
    """Return the logit entries of tokens, and which of the tokens have one."""
    if entry_of_token is None:
        return ids, slice(None)
    entries = entry_of_token[ids]
    present = entries >= 0
    return entries[present], present
