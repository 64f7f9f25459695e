"""Compiles the guides of requests beside everything else: neither `execute` nor the engine ever waits for one.

Each desk thread tries a guide in a process that may be ended (`sampling.guide_trial`), then compiles it here, where the
library lets other threads run. What was tried once is not tried again. Knows nothing of Triton or the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from dspark.errors import CapacityError, RequestError
from dspark.request import Grammar
from dspark.sampling.guide_trial import LIMIT_S, GuideTrial

__all__ = ["Compile", "GuideDesk"]

_log = logging.getLogger("dspark.serving")
_NUM_THREADS: Final = 2  # one guide that takes its whole second holds no other up
_MOST_WAITING: Final = 1024
_MOST_REMEMBERED: Final = 4096  # digests

# From a guide's type and text to the grammar of one request. Raises RequestError.
Compile = Callable[[str, str | None], Grammar]
_Task = Callable[[GuideTrial], None]


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
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._tried: OrderedDict[bytes, bool] = OrderedDict()  # digest of a guide -> passed
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"dspark-guides-{index}", daemon=True)
            for index in range(_NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        kind: str,
        guide: str | None,
        *,
        then: Callable[[Grammar], object],
        failed: Callable[[Exception], None],
    ) -> None:
        """Have a guide compiled; `then` gets its grammar, in a thread of the desk, or `failed` why there is none.

        What `then` raises goes to `failed`, too.

        Raises:
            CapacityError: too many are waiting.
        """
        if self._tasks.qsize() >= _MOST_WAITING:
            raise CapacityError(f"{_MOST_WAITING} guides wait to be compiled; send the request again later")

        def task(trial: GuideTrial) -> None:
            try:
                self._check(trial, kind, guide)
                then(self._compiler()(kind, guide))
            except Exception as error:
                failed(error)

        self._tasks.put(task)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Stop the threads once they are done with what they have begun."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # whoever needs it is told
            self._compiler()
        trial = GuideTrial(limit_s=self._limit_s)
        while (task := self._tasks.get()) is not None:
            task(trial)
        trial.close()

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
