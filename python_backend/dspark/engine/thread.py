"""The thread that owns an engine. `submit`, `cancel` and the outputs are the only doors to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from dspark.engine.doors import Doors
from dspark.engine.engine import Engine
from dspark.engine.stats import EngineStats
from dspark.engine.step_report import StepWatcher
from dspark.request import Request, RequestOutput

__all__ = ["EngineThread"]

log = logging.getLogger("dspark.engine")

_IDLE_WAIT_S = 0.5  # an idle engine looks for late cancels this often


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

    # -- doors ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> int:
        """Queue a request; return its id.

        Raises:
            RequestError: it can never be served.
            CapacityError: the queue is full.
            EngineError: the engine is stopped, stopping or dead.
        """
        self._engine.check(request)
        with self._wake:
            self._let_in(len(self._open) - self._stats.num_running)
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
        """Return a copy of the counters as of the last step."""
        return replace(self._stats)

    def close(self) -> None:
        """Stop the thread; whatever is open gets an EngineError as its last output."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._join()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self._engine.step()
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

    def _take_in(self) -> bool:
        """Wait for work, take it in; return False when the thread shall end."""
        with self._wake:
            while not (self._inbox or self._cancels or self._stopping or self._engine.has_work):
                self._wake.wait(_IDLE_WAIT_S)
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

    def _begin(self, request_id: int, request: Request) -> None:
        def emit(output: RequestOutput) -> None:
            if output.final:
                self._open.pop(request_id, None)
                self._engine_ids.pop(request_id, None)
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
