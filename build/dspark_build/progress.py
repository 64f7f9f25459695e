"""What a long command tells its user, and how it is asked to stop. Standard error only."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Self

__all__ = ["ProgressLine", "StopSignal", "say"]


def say(message: str) -> None:
    """Print one line for people."""
    print(message, file=sys.stderr, flush=True)


class StopSignal:
    """True once SIGTERM or Ctrl-C came; a second Ctrl-C interrupts at once. Works in the main thread.

    One inside another tells the outer one, too: a command that runs others sees that one of them was stopped. It also
    takes over what the outer one was asked before: what came between two commands stops the second.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
            outer = self._outer(number)
            self._asked = self._asked or (outer is not None and outer._asked)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _outer(self, number: int) -> StopSignal | None:
        outer = getattr(self._before.get(number), "__self__", None)
        return outer if isinstance(outer, StopSignal) else None

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = True
        if (outer := self._outer(number)) is not None:
            outer._asked = True
        say("stopping at the next safe point; Ctrl-C again interrupts at once")


class ProgressLine:
    """A bar on a terminal; elsewhere one line every `every_s` seconds.

    Arguments:
        every_s: seconds between lines when standard error is not a terminal.
    """

    WIDTH = 24

    def __init__(self, *, every_s: float = 20.0) -> None:
        self._terminal = sys.stderr.isatty()
        self._every_s = 0.2 if self._terminal else every_s
        self._last = 0.0

    def show(self, share: float, text: str, *, force: bool = False) -> None:
        """Show how far the work is (0 to 1) and a text; skipped when the last one is too fresh."""
        now = time.monotonic()
        if not force and now - self._last < self._every_s:
            return
        self._last = now
        share = min(max(share, 0.0), 1.0)
        full = round(share * self.WIDTH)
        line = f"{share:6.1%} |{'#' * full}{'.' * (self.WIDTH - full)}| {text}"
        if self._terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the line on a terminal."""
        if self._terminal:
            print(file=sys.stderr, flush=True)
