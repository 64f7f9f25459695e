"""How many prompt tokens a step may compute beside running answers, so that a long prompt does not freeze them.

Learnt from the steps themselves: how long a step takes without prompt rows, and what each row adds. A step with prompt
rows may take `stretch` times the usual, and in any case a time that no reader notices: prompts that trickle in keep the
batch from filling. Pure: no clock.
"""

from __future__ import annotations

from typing import Final

__all__ = ["UNNOTICED_S", "PrefillBudget"]

_SHARE: Final = 0.1  # of a new observation in the running means
UNNOTICED_S: Final = (
    0.02  # between two pieces of an answer: fifty a second, some ten times as fast as people read
)
_SMALLEST: Final = 4  # prompt tokens that every step may compute, so that a prompt always comes on


class PrefillBudget:
    """See the module's text.

    Arguments:
        max_tokens: the most in any step; also what a step may compute when nothing else runs.
        stretch: how many times as long as usual a step may take.
        unnoticed_s: seconds that a step may take however short it usually is.
    """

    def __init__(self, *, max_tokens: int, stretch: float = 2.0, unnoticed_s: float = UNNOTICED_S) -> None:
        self._max_tokens = max_tokens
        self._stretch = stretch
        self._unnoticed_s = unnoticed_s
        self._alone_s: float | None = None  # seconds of a step that only decodes
        self._row_s: float | None = None  # seconds that one prompt row adds

    def tokens(self, *, num_decoding: int) -> int:
        """Return how many prompt tokens the next step may compute."""
        if num_decoding == 0:
            return self._max_tokens
        if self._alone_s is None or self._row_s is None:
            return min(self._max_tokens, 32)  # nothing is known yet
        spare_s = max(self._stretch * self._alone_s, self._unnoticed_s) - self._alone_s
        return max(min(int(spare_s / self._row_s), self._max_tokens), min(_SMALLEST, self._max_tokens))

    def observe(self, *, num_decoding: int, prefill_tokens: int, step_s: float) -> None:
        """Take the time of one step."""
        if num_decoding and not prefill_tokens:
            self._alone_s = _mean(self._alone_s, step_s)
        elif prefill_tokens:
            base_s = self._alone_s if num_decoding and self._alone_s is not None else 0.0
            row_s = max(step_s - base_s, 0.1 * step_s) / prefill_tokens
            # Per row a small chunk costs more than a large one; beside answers chunks are small.
            self._row_s = _mean(self._row_s, row_s)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _SHARE * (value - before)
