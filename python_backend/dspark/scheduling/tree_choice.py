"""Trees or chains: whichever gave more tokens a second with about as many sequences.

A tree costs more to draft and to verify than a chain and is accepted further. What weighs more depends on the machine
and on the load, so both are measured: what is behind is tried for a few steps now and then. It starts from what was
found on a CPU: trees pay for one sequence, chains for more (docs/benchmarks.md).

Only steps that are over decide, so no choice leans on the drafts it is about. No clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["TreeChoice"]

_ALONE, _TOGETHER = 1.05, 0.95  # tokens a second of trees over chains, before anything was seen
_BELIEF = 64.0  # steps that this is worth
_FADE = 0.995  # of what is known of trees with every step that drafted them, and of chains likewise
_TRIED_STEPS = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 1024  # steps from one trial to the next


@dataclass(slots=True)
class _Seen:
    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, num_tokens: int, step_s: float) -> None:
        self.tokens = _FADE * self.tokens + num_tokens
        self.seconds = _FADE * self.seconds + step_s
        self.steps = _FADE * self.steps + 1.0


class _Size:
    """With about one number of sequences."""

    def __init__(self, prior: float) -> None:
        self.chains, self.trees = _Seen(), _Seen()
        self._log_prior = math.log(prior)
        self._num_steps = 0
        self._due_at, self._pause = _FIRST_PAUSE, _FIRST_PAUSE

    def trees_lead(self) -> bool:
        chains, trees = self.chains, self.trees
        steps = min(chains.steps, trees.steps)
        if not steps:
            return self._log_prior > 0.0
        seen = math.log(trees.tokens * chains.seconds / (trees.seconds * chains.tokens))
        return steps * seen + _BELIEF * self._log_prior > 0.0

    def next_is_tree(self) -> bool:
        self._num_steps += 1
        tried = self._num_steps - self._due_at
        if tried >= _TRIED_STEPS:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._due_at = self._num_steps + self._pause
        return self.trees_lead() != (0 <= tried < _TRIED_STEPS)


class TreeChoice:
    """See the module's text."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by twice the logarithm of the number of sequences

    def next_is_tree(self, num_sequences: int) -> bool:
        """Return whether the next step should draft trees."""
        return self._of(num_sequences).next_is_tree()

    def observe(self, *, num_sequences: int, trees: bool, num_tokens: int, step_s: float) -> None:
        """Take a step that drafted trees, or chains, without prompts in it.

        Arguments:
            num_tokens: committed, > 0.
            step_s: seconds of the whole step; what is not a time is ignored.
        """
        if 0.0 < step_s < math.inf:
            size = self._of(num_sequences)
            (size.trees if trees else size.chains).add(num_tokens, step_s)

    def _of(self, num_sequences: int) -> _Size:
        key = round(2.0 * math.log2(num_sequences))
        if key not in self._sizes:
            self._sizes[key] = _Size(_ALONE if num_sequences == 1 else _TOGETHER)
        return self._sizes[key]
