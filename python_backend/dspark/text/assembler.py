"""The text of one answer, token by token: detokenizer and stop strings in one.

The deltas joined, and `finish` behind them, are the text of the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from dspark.text.detokenizer import IncrementalDetokenizer
from dspark.text.stop import StopMatcher

__all__ = ["TextAssembler", "TextDelta"]


class _Tokenizer(Protocol):
    leading_space_stripped: bool

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class TextDelta(NamedTuple):
    """What one token added. `stopped` = it completed a stop string, and is the last token."""

    text: str
    stopped: bool


class TextAssembler:
    """Turns tokens into text that may leave, and says when a stop string ends the answer.

    Arguments:
        token_bytes, is_special, strip_leading_space: as for `IncrementalDetokenizer`.
        stop_words: as for `StopMatcher`.
        min_tokens: stop strings are looked for only in the text behind this many tokens.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
        *,
        strip_leading_space: bool = False,
        stop_words: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            token_bytes, is_special, strip_leading_space=strip_leading_space
        )
        self._matcher = StopMatcher(stop_words)
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []

    @classmethod
    def for_tokenizer(
        cls, tokenizer: _Tokenizer, stop_words: Sequence[str] = (), *, min_tokens: int = 0
    ) -> TextAssembler:
        """Make one for an answer that this tokenizer's model gives."""
        return cls(
            tokenizer.token_bytes,
            tokenizer.is_special,
            strip_leading_space=tokenizer.leading_space_stripped,
            stop_words=stop_words,
            min_tokens=min_tokens,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that belong to the answer, the one that completed a stop string included."""
        return tuple(self._token_ids)

    @property
    def stopped(self) -> bool:
        """True once a stop string was found."""
        return self._matcher.matched

    def push(self, token_id: int) -> TextDelta:
        """Take one token. Behind a stop string tokens are ignored."""
        if self._matcher.matched:
            return TextDelta("", True)
        self._token_ids.append(token_id)
        text = self._detokenizer.push(token_id)
        if len(self._token_ids) <= self._min_tokens:
            return TextDelta(text, False)
        return TextDelta(*self._matcher.push(text))

    def extend(self, token_ids: Sequence[int]) -> tuple[TextDelta, int]:
        """Take tokens up to a stop string; return their joined delta and how many belong to the answer."""
        before = len(self._token_ids)
        deltas = [self.push(token_id) for token_id in token_ids]
        return TextDelta("".join(delta.text for delta in deltas), self.stopped), len(self._token_ids) - before

    def finish(self) -> str:
        """Return the rest: what was held back for a stop string or a character that never came."""
        if self._matcher.matched:
            return ""
        text, matched = self._matcher.push(self._detokenizer.finish())
        return text if matched else text + self._matcher.finish()
