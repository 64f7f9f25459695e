"""What drafting gave, over what it had promised: measured in tokens and seconds of steps that are over.

A promise leans on a cost model, on a calibrator and on earlier blocks, and each may be off; who drafts because of an
error never sees it. So what drafted steps gave is counted against the promise, steps that draft nothing are put in
between to see what those really take, and the next promise is believed as far as the earlier ones came true.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

__all__ = ["PLAIN_STEPS", "DraftedStep", "Experience", "StepTimes"]

PLAIN_STEPS = 4  # steps without drafts in one comparison
_FADE = 0.98  # of what is known, with every drafted step
_FADE_IDLE = 0.99  # likewise with every plan that drafts nothing: what was bad is tried again
_BELIEF = 12.0  # steps that believing the promise is worth
_CUT = 1.5  # a step beyond so many usual ones is a hiccup of the machine
_SHARE = 0.1  # of a new step in what is usual
_KEPT, _LEAST = 8, 3  # steps of one size that are kept, and that say something
_OLD = 512  # steps after which they say nothing
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # steps from one comparison to the next
_CLEAR_FIRST, _CLEAR_PAUSE = (
    256,
    2048,
)  # where drafting pays so much that an error of some percent decides nothing


class Experience:
    """With batches of about one size.

    Arguments:
        alone: that size is one; it has much to win by its drafts and little to lose, so it is compared rarely.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._due_at: int | None = None  # step of the next comparison; None = none was asked for yet
        self._alone = alone
        self._pause = _LONGEST_PAUSE if alone else _FIRST_PAUSE
        self._got = 0.0  # tokens of drafted steps
        self._promised = 0.0  # tokens promised for the time they took
        self._num_steps = 0.0  # of them, faded
        self._usual = 0.0  # their seconds over those of a plain step

    @property
    def trust(self) -> float:
        """What drafting gave over what was promised, 1 where nothing is known."""
        if not self._num_steps:
            return 1.0
        prior = _BELIEF * self._promised / self._num_steps
        return (self._got + prior) / (self._promised + prior)

    @property
    def doubt(self) -> float:
        """How much of the doubt in the estimates is left, from 1 to 0: what was seen to come true needs none."""
        return _BELIEF / (_BELIEF + self._num_steps)

    def comparison_is_due(self, step: int, *, clear: bool) -> bool:
        """Return whether the next steps should draft nothing, to see what they take; pauses become longer.

        Arguments:
            step: number of this one.
            clear: drafting promises much.
        """
        if clear:
            self._pause = max(self._pause, _CLEAR_FIRST)
        if self._due_at is None:
            self._due_at = step + self._pause if clear or self._alone else step
        if step < self._due_at:
            return False
        self._due_at = step + self._pause
        self._pause = min(2 * self._pause, _CLEAR_PAUSE if clear else _LONGEST_PAUSE)
        return True

    def drafted(
        self, *, promise: float, num_tokens: int, num_sequences: int, step_s: float, plain_s: float
    ) -> None:
        """Take a step that drafted as planned.

        Arguments:
            promise: tokens per second over those of plain decoding.
            num_tokens: that it gave.
            plain_s: what it would have taken without drafts.
        """
        longer = step_s / plain_s
        if self._usual:
            longer = min(longer, _CUT * self._usual)
            self._usual += _SHARE * (longer - self._usual)
        else:
            self._usual = longer
        self._got = _FADE * self._got + num_tokens
        self._promised = _FADE * self._promised + promise * num_sequences * longer
        self._num_steps = _FADE * self._num_steps + 1.0

    def idle(self) -> None:
        """Say that a plan drafts nothing."""
        self._got *= _FADE_IDLE
        self._promised *= _FADE_IDLE
        self._num_steps *= _FADE_IDLE


class DraftedStep(NamedTuple):
    """A step that drafted."""

    rows: int  # of the pass
    num_blocks: int  # that the drafter ran for
    step_s: float


class StepTimes:
    """What the last steps without prompts took, by the number of sequences: those that drafted nothing, and others.

    Steps that lie far apart are compared, so times are kept in those of the machine's pace (seconds over what they
    would be on the machine of the curve): one that has become slower since then has not made drafting better.
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[tuple[int, float]]] = {}
        self._drafted: dict[int, deque[tuple[int, DraftedStep]]] = {}

    def observe_plain(self, step: int, *, num_sequences: int, step_s: float, pace: float) -> None:
        """Take the time of a step of this number that drafted nothing, at this pace."""
        self._plain.setdefault(num_sequences, deque(maxlen=_KEPT)).append((step, step_s / pace))

    def observe_drafted(self, step: int, *, num_sequences: int, taken: DraftedStep, pace: float) -> None:
        """Take a step of this number that drafted, at this pace."""
        taken = taken._replace(step_s=taken.step_s / pace)
        self._drafted.setdefault(num_sequences, deque(maxlen=_KEPT)).append((step, taken))

    def plain_s(self, step: int, *, num_sequences: int, pace: float) -> float | None:
        """Return the median of the last that drafted nothing at this pace; None if too few are known or all are old."""
        seconds = [step_s for at, step_s in self._plain.get(num_sequences, ()) if step - at <= _OLD]
        return pace * median(seconds) if len(seconds) >= _LEAST else None

    def drafted_error(
        self, step: int, *, num_sequences: int, foreseen_s: Callable[[DraftedStep], float], pace: float
    ) -> float | None:
        """Return the median of seconds, at this pace, over those foreseen of the last ones that drafted.

        None as `plain_s`.
        """
        known = [taken for at, taken in self._drafted.get(num_sequences, ()) if step - at <= _OLD]
        return pace * median(t.step_s / foreseen_s(t) for t in known) if len(known) >= _LEAST else None
