"""What every thread that serves requests has at its doors: whether it lives, who may come in, how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from dspark.errors import CapacityError, EngineError
from dspark.request import Request, RequestOutput

__all__ = ["Doors", "Place"]

log = logging.getLogger("dspark.engine")


class Place:
    """A place in the queue for a request that comes later. `submit` takes it; whoever will not submit gives it back."""

    def __init__(self, places: set[Place], lock: AbstractContextManager[object]) -> None:
        self._places, self._lock = places, lock

    def give_back(self) -> None:
        """Let another have it; nothing happens where that was done, or the request submitted."""
        with self._lock:
            self._places.discard(self)


class Doors:
    """Base of the threads.

    Arguments:
        thread: not started.
        requests: those without a final output, by id.
        lock: held while one is let in.
        max_queue_size: requests that may wait; one more is refused at once.
    """

    def __init__(
        self,
        thread: threading.Thread,
        requests: Mapping[int, object],
        lock: AbstractContextManager[object],
        *,
        max_queue_size: int,
    ) -> None:
        self._thread, self._requests, self._lock = thread, requests, lock
        self._max_queue_size = max_queue_size
        self._places: set[Place] = set()  # held for requests that are not here yet
        self._draining = self._stopping = False
        self._death: BaseException | None = None

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._death is None and not self._stopping

    @property
    def died(self) -> bool:
        """True when a fault ended the thread; a stop that was asked for is none."""
        return self._death is not None

    @property
    def num_open(self) -> int:
        """Requests without a final output."""
        return len(self._requests)

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; return False when some is left after the time-out."""
        with self._lock:
            self._draining = True
        deadline = time.monotonic() + timeout_s
        while (self._requests or self._places) and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not (self._requests or self._places)

    def hold_place(self) -> Place:
        """Take a place in the queue for a request that something else has to be done for first.

        Raises:
            CapacityError: the queue is full.
            EngineError: the engine is stopped, stopping or dead.
        """
        with self._lock:
            self._let_in(None)
            place = Place(self._places, self._lock)
            self._places.add(place)
        return place

    def _num_waiting(self) -> int:
        """Return how many of the requests have not begun."""
        raise NotImplementedError

    def _let_in(self, place: Place | None) -> None:
        """Refuse a request that cannot be queued; one that held a place has been let in, and gives it back.

        Raises:
            CapacityError: the queue is full.
            EngineError: the engine is stopped, stopping or dead.
        """
        held = place in self._places
        if place is not None:
            self._places.discard(place)
        if self._death is not None:
            raise EngineError(f"the engine died: {self._death!r}; restart the server")
        if self._stopping or (self._draining and not held) or not self._thread.is_alive():
            raise EngineError("the engine is stopped and takes no more requests")
        num_waiting = self._num_waiting() + len(self._places)
        if not held and num_waiting >= self._max_queue_size:
            raise CapacityError(
                f"the queue is full: {num_waiting} requests wait, max_queue_size is {self._max_queue_size}"
            )

    def _join(self) -> None:
        """Wait for the thread, unless this is it."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _fail_all(self, left: Mapping[int, Request]) -> None:
        """Give requests that the end of the thread leaves open an EngineError as their last output."""
        reason = "the engine was stopped" if self._death is None else f"the engine died: {self._death!r}"
        for request_id, request in left.items():
            try:
                request.emit(RequestOutput(request_id=request_id, error=EngineError(reason)))
            except Exception:
                log.exception("request %d: its receiver failed while the engine ended", request_id)
