"""Keeps a server and its gateway serving: starts anew what died, says so, and gives up on what dies again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from dspark.errors import EngineError

__all__ = ["Child", "Supervisor"]

_WINDOW_S: Final = 600.0  # restarts are counted over so long


class Child(Protocol):
    """One thing that must run."""

    def fault(self) -> str | None:
        """Return why it serves no more, None while it does."""

    def revive(self) -> None:
        """Start it anew and wait until it serves. Raises EngineError."""


class Supervisor:
    """See the module's text.

    Arguments:
        children: in the order they depend on each other.
        max_restarts: within ten minutes, of all children together; one more ends the supervisor.
        say: tells the operator.
    """

    def __init__(
        self,
        children: list[Child],
        *,
        max_restarts: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._children = children
        self._max_restarts = max_restarts
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._restarts: deque[float] = deque()

    def look(self) -> None:
        """Look at every child once and start anew those that have died.

        Raises:
            EngineError: it died too often, or cannot be started.
        """
        for child in self._children:
            reason = child.fault()
            if reason is not None:
                self._revive(child, reason)

    def _revive(self, child: Child, reason: str) -> None:
        now_s = self._clock()
        while self._restarts and now_s - self._restarts[0] > _WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            again = (
                f", {len(self._restarts)} restarts in {_WINDOW_S / 60:g} minutes" if self._restarts else ""
            )
            raise EngineError(f"{reason}{again}")
        # The first restart comes at once, each further one after twice the wait.
        wait_s = 0.0 if not self._restarts else min(2.0 ** (len(self._restarts) - 1), 30.0)
        self._restarts.append(now_s)
        self._say(f"{reason}: starting it anew" + (f" in {wait_s:g} s" if wait_s else ""))
        self._sleep(wait_s)
        started_s = self._clock()
        child.revive()
        self._say(f"ready again after {self._clock() - started_s:.1f} s")
