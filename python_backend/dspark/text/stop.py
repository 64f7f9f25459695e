"""Finds stop strings in streamed text, and holds back whatever could still become one.

Knows nothing of tokens: the answer depends on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings: linear in the text, however many strings there are.

    The match is the stop string that is complete first; of several that are complete with the same character
    the longest. Its text and everything behind it are dropped.

    Arguments:
        stop_words: non-empty strings; none at all passes every text through.
    """

    def __init__(self, stop_words: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # children of each state; state 0 has read nothing of use
        self._depth = [0]  # characters that a state stands for = text that must be held back
        self._match_len = [0]  # longest stop string that ends in a state, 0 = none
        for word in stop_words:
            self._insert(word)
        self._fall = self._link()
        self._state = 0
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        """True once a stop string was found."""
        return self._matched

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece of text; return what is safe to show, and whether a stop string was found.

        After a match nothing is ever shown.
        """
        if self._matched:
            return "", True
        if len(self._next) == 1:
            return text, False
        state = self._state
        for index, char in enumerate(text):
            while state and char not in self._next[state]:
                state = self._fall[state]
            state = self._next[state].get(char, 0)
            if self._match_len[state]:
                self._matched = True
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - self._match_len[state]], True
        self._state = state
        seen = self._held + text
        safe = len(seen) - self._depth[state]
        self._held = seen[safe:]
        return seen[:safe], False

    def finish(self) -> str:
        """Return the text that was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _insert(self, word: str) -> None:
        state = 0
        for char in word:
            child = self._next[state].get(char)
            if child is None:
                child = len(self._next)
                self._next[state][char] = child
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match_len.append(0)
            state = child
        self._match_len[state] = len(word)

    def _link(self) -> list[int]:
        """Return the state of each state's longest proper suffix, and pass matches on along these links."""
        fall = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._match_len[state] = max(self._match_len[state], self._match_len[fall[state]])
            for char, child in self._next[state].items():
                suffix = fall[state]
                while suffix and char not in self._next[suffix]:
                    suffix = fall[suffix]
                fall[child] = self._next[suffix].get(char, 0)
                queue.append(child)
        return fall
