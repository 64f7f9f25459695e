"""Compiles the guides of requests beside everything else: neither `execute` nor the engine ever waits for one.

Each desk thread tries a guide in a process that may be ended (`sampling.guide_trial`), then compiles it here, where the
library lets other threads run. What was tried once is not tried again, and has a thread of its own: a schema in daily
use never waits behind new ones. One more thread looks whether a request still waits for its guide: its client may
leave, its time may be over, or it has waited longer than anybody should. How many may wait is the caller's affair.
Knows nothing of Triton or the engine.
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
_LONGEST_WAIT_S: Final = 30.0  # of a request for its guide; as many new guides are tried as fit into it
_POLL_INTERVAL_S: Final = 0.05  # a request whose time is over is told within this
_MOST_REMEMBERED: Final = 4096  # digests

# From a guide's type and text to the grammar of one request. Raises RequestError.
Compile = Callable[[str, str | None], Grammar]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """A guide, and whom it is for."""

    kind: str
    guide: str | None
    digest: bytes
    latest_s: float  # on time.monotonic()'s clock: then it has waited long enough
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
        longest_wait_s: a request whose guide is not compiled by then is refused, until the desk has caught up.
    """

    def __init__(
        self,
        make_compiler: Callable[[], Compile],
        *,
        limit_s: float = LIMIT_S,
        prepared: Callable[[], object] = lambda: None,
        longest_wait_s: float = _LONGEST_WAIT_S,
    ) -> None:
        self._make_compiler = make_compiler
        self._prepared = prepared
        self._compile: Compile | Exception | None = None
        self._limit_s = limit_s
        self._longest_wait_s = longest_wait_s
        self._came = threading.Condition()  # guards the four below
        self._open: set[_Asked] = set()  # nobody has been told anything
        self._waiting: dict[_Asked, None] = {}  # of them, those that no thread has begun, in their order
        self._tried: OrderedDict[bytes, bool] = OrderedDict()  # digest of a guide -> passed
        self._closing = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(new,), name=f"dspark-guides-{index}", daemon=True)
            for index, new in enumerate([True] * _NUM_THREADS + [False])
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
        """
        asked = _Asked(
            kind=kind,
            guide=guide,
            digest=hashlib.sha256(f"{kind}\0{guide}".encode()).digest(),
            latest_s=time.monotonic() + self._longest_wait_s,
            then=then,
            failed=failed,
            is_over=is_over,
            over=over,
        )
        with self._came:
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

    def _run(self, new: bool) -> None:
        """Serve guides; unless `new`, only such as were tried before."""
        with contextlib.suppress(Exception):  # whoever needs it is told
            self._compiler()
        trial = GuideTrial(limit_s=self._limit_s)
        while (asked := self._next(new)) is not None:
            self._serve(trial, asked)
            del asked  # the request behind it is not kept until the next one comes
        trial.close()

    def _next(self, new: bool) -> _Asked | None:
        """Wait for a guide and return it; None when it is time to stop."""

        def found() -> _Asked | None:
            return next((asked for asked in self._waiting if new or asked.digest in self._tried), None)

        with self._came:
            asked = None
            while not self._closing and (asked := found()) is None:
                self._came.wait()
            if self._closing or asked is None:
                return None
            del self._waiting[asked]
            return asked

    def _serve(self, trial: GuideTrial, asked: _Asked) -> None:
        try:
            self._check(trial, asked)
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
        if asked.is_over():
            if self._settle(asked):
                asked.over()
        elif time.monotonic() >= asked.latest_s and self._settle(asked):
            waited = f"the guide was not compiled within {self._longest_wait_s:g} s, as others come before it"
            asked.failed(CapacityError(f"{waited}; send the request again later"))

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

    def _check(self, trial: GuideTrial, asked: _Asked) -> None:
        """Refuse a guide that takes too long.

        Raises:
            RequestError: it does.
            CapacityError: it could not be tried now.
        """
        kind, guide = asked.kind, asked.guide
        with self._came:
            passed = self._tried.get(asked.digest)
        if passed is None:
            try:
                passed = trial.passes(kind, guide)
            except OSError:
                _log.exception("guides cannot be tried in a process of their own; they are compiled untried")
                return
            if passed is None:  # not remembered: the guide may be right
                raise CapacityError("the guide could not be tried; send the request again later")
            with self._came:
                self._tried[asked.digest] = passed
                while len(self._tried) > _MOST_REMEMBERED:
                    self._tried.popitem(last=False)
                self._came.notify_all()  # whoever waits with the same guide need not wait for another
        if not passed:
            allowed = f"a {kind} that is compiled within {self._limit_s:g} s (of processor time)"
            raise RequestError("guided_decoding_guide", guide, allowed)
