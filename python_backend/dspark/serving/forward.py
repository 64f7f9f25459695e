"""The model `vllm_model`: requests without a batch dimension, handed to the model `dspark` in its process.

Triton compares the number of dimensions before a model sees anything, so clients that send `[1]` need a name of their
own; and it tells an ensemble's steps of no client that leaves, so this is a small model in a process of its own. It
adds the dimension, hands over, passes on what comes back, and tells the other side when the client has gone. Which
fields there are, and what they mean, it does not know.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from typing import Any, Final

from dspark.errors import EngineError
from dspark.serving.door import Answer, Handed, door_path
from dspark.serving.watch import RunDir, watch_parents

__all__ = ["ForwardingModel"]

_log = logging.getLogger("dspark.serving")
_POLL_INTERVAL_S: Final = 0.1  # a client that has gone is noticed within this, among not too many
# Asked at a time, in turn; `stream` says what asking costs.
_MOST_POLLS: Final = max(1, round(2.5 * len(os.sched_getaffinity(0))))


class ForwardingModel:
    """What Triton's Python backend calls. A subclass in the model repository names the backend's module."""

    backend: Any

    def initialize(self, _args: Mapping[str, str]) -> None:
        """Begin; the other model need not be there yet."""
        self._run_dir = RunDir.of_environment()
        watch_parents(self._run_dir, None, name="forwarding")
        self._path = str(door_path(os.getppid()))
        self._open: dict[Connection, Any] = {}  # connection -> response sender
        self._told: set[Connection] = set()  # of them, those whose client has gone
        self._selector = selectors.DefaultSelector()
        self._waking, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dspark-forward", daemon=True)
        self._thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand every request over; where that fails it is answered here."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                connection = self._hand(request)
            except OSError:
                error = EngineError("the model behind this one is not there; send the request again later")
                self._fail(sender, error.code, f"[{error.code}] {error}")
                continue
            self._open[connection] = sender
            self._selector.register(connection, selectors.EVENT_READ)
            self._waking.send(b".")

    def finalize(self) -> None:
        """Stop; Triton calls this when no request is open."""
        self._stopping = True
        self._waking.send(b".")
        self._thread.join()
        self._selector.close()
        for end in (self._waking, self._woken):
            end.close()
        if self._run_dir is not None:
            self._run_dir.process_ends("forwarding")

    def _hand(self, request: Any) -> Connection:
        context = request.trace().get_context()
        handed = Handed(
            inputs={tensor.name(): tensor.as_numpy()[None] for tensor in request.inputs()},
            parameters=request.parameters() or "{}",
            outputs=tuple(request.requested_output_names()),
            request_id=request.request_id(),
            timeout_us=request.timeout(),
            trace=context or None,
        )
        connection = Client(self._path, family="AF_UNIX")
        connection.send(handed)
        return connection

    # ---- the thread that talks to Triton ----

    def _run(self) -> None:
        next_poll_s = 0.0
        while not self._stopping:
            for key, _ in self._selector.select(_POLL_INTERVAL_S if self._open else None):
                if key.fileobj is self._woken:
                    self._woken.recv(1 << 12)
                else:
                    self._pass_on(key.fileobj)  # type: ignore[arg-type]  # all others are connections
            if time.monotonic() >= next_poll_s:
                next_poll_s = time.monotonic() + _POLL_INTERVAL_S
                self._look_for_cancels()

    def _pass_on(self, connection: Connection) -> None:
        """Send one response to the client."""
        try:
            answer: Answer = connection.recv()
        except (OSError, EOFError):
            lost = "[UNAVAILABLE] the model behind this one has ended; send the request again later"
            answer = Answer(outputs={}, final=True, error=("UNAVAILABLE", lost))
        sender = self._open[connection]
        if answer.final:
            # In this order: a cancel that meets the last response leaks the request in the server.
            self._let_go(connection)
        try:
            self._respond(sender, answer)
        except Exception:  # this request's own: the thread goes on for the others
            _log.exception("a response could not be sent; the request is failed")
            if not answer.final:
                self._let_go(connection)  # to the other side as if the client had gone
            with contextlib.suppress(Exception):  # then the final flag had left before
                self._fail(sender, "INTERNAL", "[INTERNAL] a response could not be sent")

    def _let_go(self, connection: Connection) -> None:
        del self._open[connection]
        self._told.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    def _respond(self, sender: Any, answer: Answer) -> None:
        if answer.error is not None:
            self._fail(sender, *answer.error)
            return
        backend = self.backend
        tensors = [backend.Tensor(name, array) for name, array in answer.outputs.items()]
        flags = backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if answer.final else 0
        sender.send(backend.InferenceResponse(output_tensors=tensors), flags=flags)

    def _fail(self, sender: Any, code: str, message: str) -> None:
        backend = self.backend
        error = backend.TritonError(message, getattr(backend.TritonError, code))
        response = backend.InferenceResponse(output_tensors=[], error=error)
        sender.send(response, flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _look_for_cancels(self) -> None:
        turn = [one for one in list(self._open) if one not in self._told][:_MOST_POLLS]
        for connection in turn:
            sender = self._open[connection] = self._open.pop(connection)  # now it is the last one
            if sender.is_cancelled():
                # Once: nobody reads it over there, and a full socket would hold this thread.
                self._told.add(connection)
                with contextlib.suppress(OSError):  # it has ended, which the next look at it tells
                    connection.send("the client has gone")
