"""Compiles the guides of requests beside everything else: neither `execute` nor the engine ever waits for one.

Each desk thread tries a guide in a process that may be ended (`sampling.guide_trial`), then compiles it here, where the
library lets other threads run. What was tried once is not tried again. One more thread looks whether a request still
waits for its guide: its client may leave, its time may be over. Knows nothing of Triton or the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dspark.errors import CapacityError, RequestError
from dspark.request import Grammar
from dspark.sampling.guide_trial import LIMIT_S, GuideTrial

__all__ = ["Compile", "GuideDesk"]

_log = logging.getLogger("dspark.serving")
_NUM_THREADS: Final = 2  # one guide that takes its whole second holds no other up
_MOST_WAITING: Final = 1024
_POLL_INTERVAL_S: Final = 0.05  # a request whose time is over is told within this
_MOST_REMEMBERED: Final = 4096  # digests

# From a guide's type and text to the grammar of one request. Raises RequestError.
Compile = Callable[[str, str | None], Grammar]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """A guide, and whom it is for."""

    kind: str
    guide: str | None
    then: Callable[[Grammar], object]
    failed: Callable[[Exception], object]
    is_over: Callable[[], bool]
    over: Callable[[], object]


class GuideDesk:
    """See the module's text.

    Arguments:
        make_compiler: makes what compiles guides that have passed the trial; called once, in a thread of the desk, so
            that no start waits for a library and its view of a vocabulary.
        limit_s: seconds of processor time that a guide may take.
        prepared: called in that thread when the compiler is there.
    """

    def __init__(
        self,
        make_compiler: Callable[[], Compile],
        *,
        limit_s: float = LIMIT_S,
        prepared: Callable[[], object] = lambda: None,
    ) -> None:
        self._make_compiler = make_compiler
        self._prepared = prepared
        self._compile: Compile | Exception | None = None
        self._limit_s = limit_s
        self._came = threading.Condition()  # guards the three below
        self._open: set[_Asked] = set()  # nobody has been told anything
        self._waiting: dict[_Asked, None] = {}  # of them, those that no thread has begun, in their order
        self._closing = False
        self._tried: OrderedDict[bytes, bool] = OrderedDict()  # digest of a guide -> passed
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"dspark-guides-{index}", daemon=True)
            for index in range(_NUM_THREADS)
        ]
        self._threads.append(threading.Thread(target=self._watch, name="dspark-guides-watch", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        kind: str,
        guide: str | None,
        *,
        then: Callable[[Grammar], object],
        failed: Callable[[Exception], object],
        is_over: Callable[[], bool] = lambda: False,
        over: Callable[[], object] = lambda: None,
    ) -> None:
        """Have a guide compiled; `then` gets its grammar, in a thread of the desk, or `failed` why there is none.

        What `then` raises goes to `failed`, too. Where `is_over`, which costs nothing, says first that nobody waits any
        more, `over` is called instead of either, at once, however long the guides before this one take.

        Raises:
            CapacityError: too many are waiting.
        """
        asked = _Asked(kind=kind, guide=guide, then=then, failed=failed, is_over=is_over, over=over)
        with self._came:
            if len(self._waiting) >= _MOST_WAITING:
                raise CapacityError(
                    f"{_MOST_WAITING} guides wait to be compiled; send the request again later"
                )
            self._open.add(asked)
            self._waiting[asked] = None
            self._came.notify_all()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop the threads once they are done with what they have begun."""
        with self._came:
            self._closing = True
            self._came.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whoever needs it is told
            self._compiler()
        trial = GuideTrial(limit_s=self._limit_s)
        while (asked := self._next()) is not None:
            self._serve(trial, asked)
            del asked  # the request behind it is not kept until the next one comes
        trial.close()

    def _next(self) -> _Asked | None:
        """Wait for a guide and return it; None when it is time to stop."""
        with self._came:
            self._came.wait_for(lambda: self._waiting or self._closing)
            if self._closing:
                return None
            asked = next(iter(self._waiting))
            del self._waiting[asked]
            return asked

    def _serve(self, trial: GuideTrial, asked: _Asked) -> None:
        try:
            self._check(trial, asked.kind, asked.guide)
            if asked not in self._open:
                return
            grammar = self._compiler()(asked.kind, asked.guide)
        except Exception as error:
            if self._settle(asked):
                asked.failed(error)
            return
        if self._settle(asked):
            try:
                asked.then(grammar)
            except Exception as error:
                asked.failed(error)

    def _settle(self, asked: _Asked) -> bool:
        """Return whether the caller is the one to tell this request something; true once."""
        with self._came:
            self._waiting.pop(asked, None)
            if asked not in self._open:
                return False
            self._open.discard(asked)
            return True

    def _watch(self) -> None:
        """End the requests that nobody waits for any more."""
        while not self._closing:
            with self._came:
                self._came.wait_for(lambda: self._open or self._closing)
                left = list(self._open)
            while left:
                self._end_if_over(left.pop())
            time.sleep(_POLL_INTERVAL_S)

    def _end_if_over(self, asked: _Asked) -> None:
        if asked.is_over() and self._settle(asked):
            asked.over()

    def _compiler(self) -> Compile:
        """Return the compiler, made by whichever thread comes first. Raises what making it raised."""
        with self._lock:
            if self._compile is None:
                try:
                    self._compile = self._make_compiler()
                except Exception as error:
                    _log.exception("guides cannot be compiled")
                    self._compile = error
                self._prepared()
            if isinstance(self._compile, Exception):
                raise self._compile
            return self._compile

    def _check(self, trial: GuideTrial, kind: str, guide: str | None) -> None:
        """Refuse a guide that takes too long.

        Raises:
            RequestError: it does.
            CapacityError: it could not be tried now.
        """
        digest = hashlib.sha256(f"{kind}\0{guide}".encode()).digest()
        with self._lock:
            passed = self._tried.get(digest)
        if passed is None:
            try:
                passed = trial.passes(kind, guide)
            except OSError:
                _log.exception("guides cannot be tried in a process of their own; they are compiled untried")
                return
            if passed is None:  # not remembered: the guide may be right
                raise CapacityError("the guide could not be tried; send the request again later")
            with self._lock:
                self._tried[digest] = passed
                while len(self._tried) > _MOST_REMEMBERED:
                    self._tried.popitem(last=False)
        if not passed:
            allowed = f"a {kind} that is compiled within {self._limit_s:g} s (of processor time)"
            raise RequestError("guided_decoding_guide", guide, allowed)
