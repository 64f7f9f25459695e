"""The thread that owns an engine. `submit`, `cancel` and the outputs are the only doors to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dspark.engine.doors import Doors, Place
from dspark.engine.engine import Engine
from dspark.engine.stats import EngineStats
from dspark.engine.step_report import StepWatcher
from dspark.request import Request, RequestOutput

__all__ = ["EngineThread"]

log = logging.getLogger("dspark.engine")

_IDLE_WAIT_S = 0.5  # an idle engine looks for late cancels this often
# What comes to an idle engine together shall begin together: a prompt that comes during a step waits for its end, and
# is then computed beside the answers that have begun. So an idle engine waits for another request a twentieth of a
# usual step; half of one while fewer have come than have just ended, since whoever reads an answer may well ask again.
_ANOTHER: Final = 0.05
_AS_MANY: Final = 0.5
_LONGEST_GAP_S: Final = 0.005
_LONGEST_S: Final = 0.02  # in all, and never longer than a step
_SHARE: Final = 0.1  # of a new step in the usual step's time


class EngineThread(Doors):
    """Runs `Engine.step` as long as there is work, and sleeps otherwise.

    Arguments:
        engine: given away to this thread; nobody else may touch it.
        max_queue_size: requests that may wait; one more is refused at once.
        at_end: called in the thread when it ends as asked, after the last step.
    """

    def __init__(
        self, engine: Engine, *, max_queue_size: int = 1024, at_end: Callable[[], object] | None = None
    ) -> None:
        self._open: dict[int, Request] = {}  # submitted, no final output yet
        thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
        self._wake = threading.Condition()
        super().__init__(thread, self._open, self._wake, max_queue_size=max_queue_size)
        self._engine = engine
        self._at_end = at_end
        self._inbox: deque[tuple[int, Request]] = deque()
        self._cancels: deque[int] = deque()
        self._engine_ids: dict[int, int] = {}
        self._stats = EngineStats(pages_total=engine.limits.num_pages)
        self._next_id = 0
        # Of the engine's thread, about its last steps.
        self._step_s = 0.0  # what one usually takes
        self._ended_s = 0.0  # when the last one was over
        self._num_ended = 0  # answers that it brought to their end

    # -- doors ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, *, place: Place | None = None) -> int:
        """Queue a request; return its id.

        Arguments:
            place: held for it.

        Raises:
            RequestError: it can never be served.
            CapacityError: the queue is full.
            EngineError: the engine is stopped, stopping or dead.
        """
        self._engine.check(request)
        with self._wake:
            self._let_in(place)
            self._next_id += 1
            request_id = self._next_id
            self._open[request_id] = request
            self._inbox.append((request_id, request))
            self._wake.notify()
        return request_id

    def watch(self, watcher: StepWatcher) -> None:
        """Have every later step reported, from the engine's thread."""
        self._engine.watcher = watcher

    def cancel(self, request_id: int) -> None:
        """End a request before the next step; its last output says "cancelled"."""
        with self._wake:
            self._cancels.append(request_id)
            self._wake.notify()

    def stats(self) -> EngineStats:
        """Return a copy of the counters as of the last step; those that hold a place wait, too."""
        stats = self._stats
        return replace(stats, num_waiting=stats.num_waiting + len(self._places))

    def close(self) -> None:
        """Stop the thread; whatever is open gets an EngineError as its last output."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._join()

    def _num_waiting(self) -> int:
        return len(self._open) - self._stats.num_running

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self._step()
                self._stats = replace(self._engine.stats())
        except BaseException as error:
            log.exception("the engine thread died")
            self._death = error
        finally:
            self._fail_open()
        if self._at_end is not None and self._death is None:
            try:
                self._at_end()
            except Exception:
                log.exception("what was learnt could not be kept")

    def _step(self) -> None:
        self._num_ended = 0
        begun_s = time.monotonic()
        self._engine.step()
        self._ended_s = time.monotonic()
        step_s = self._ended_s - begun_s
        self._step_s += (_SHARE if self._step_s else 1.0) * (step_s - self._step_s)

    def _take_in(self) -> bool:
        """Wait for work, take it in; return False when the thread shall end."""
        with self._wake:
            while not (self._inbox or self._cancels or self._stopping or self._engine.has_work):
                self._wake.wait(_IDLE_WAIT_S)
            if not self._engine.has_work:
                self._gather()
            if self._stopping:
                return False
            arrived, self._inbox = self._inbox, deque()
            cancels, self._cancels = self._cancels, deque()
        for request_id, request in arrived:
            self._begin(request_id, request)
        for request_id in cancels:
            if request_id in self._engine_ids:
                self._engine.cancel(self._engine_ids[request_id])
        self._stats = replace(self._engine.stats())
        return True

    def _gather(self) -> None:
        """Wait while requests keep coming, with the lock held."""
        begun_s = time.monotonic()
        again = self._num_ended if begun_s < self._ended_s + 2 * self._step_s else 0
        while self._inbox and not (self._cancels or self._stopping or 0 < again <= len(self._inbox)):
            count = len(self._inbox)
            if time.monotonic() >= begun_s + min(self._step_s, _LONGEST_S):
                return
            gap_s = (_AS_MANY if count < again else _ANOTHER) * self._step_s
            self._wake.wait(min(gap_s, _LONGEST_GAP_S))
            if len(self._inbox) == count:
                return

    def _begin(self, request_id: int, request: Request) -> None:
        def emit(output: RequestOutput) -> None:
            if output.final:
                self._open.pop(request_id, None)
                self._engine_ids.pop(request_id, None)
                self._num_ended += output.finish_reason in ("stop", "length")
            request.emit(replace(output, request_id=request_id))

        try:
            self._engine_ids[request_id] = self._engine.add(replace(request, emit=emit))
        except Exception as error:
            emit(RequestOutput(request_id=request_id, error=error))

    def _fail_open(self) -> None:
        with self._wake:
            self._inbox.clear()
            left = dict(self._open)
            self._open.clear()
        self._fail_all(left)
