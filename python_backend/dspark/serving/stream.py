"""Response streams and the one thread that talks to Triton for all of them.

The engine thread hands outputs over and goes on; the outbox thread joins what has piled up for a stream into
one response, sends it, and polls for cancelled clients. So a slow sender costs the engine nothing, and no
response sender is ever used by two threads. Each stream sends the final flag exactly once whatever happens:
success, error, cancel, timeout, shutdown, engine death. Knows nothing of Triton: `ResponseSender` is the
seam.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dspark.errors import DSparkError, EngineError
from dspark.request import RequestOutput, SpecMetrics
from dspark.serving.contract import OUTPUTS
from dspark.serving.log_probs import log_prob_values
from dspark.serving.parse import ParsedRequest

__all__ = ["Arrays", "Outbox", "ResponseSender", "ResponseStream", "answer_arrays", "wire_error"]

Arrays = Mapping[str, npt.NDArray[np.generic]]

_log = logging.getLogger("dspark.serving")
_NUMPY_TYPES: Final = {spec.name: spec.numpy_type for spec in OUTPUTS}
_POLL_INTERVAL_S: Final = 0.1
# One is_cancelled is a way to the server and back, over four threads: alone 30-47 us, beside a pass as dear as a
# response. So many a second for each core are asked in turn: with five streams on two cores a client that leaves is
# seen within 0.1 s, with sixteen within 0.4.
_POLLS_PER_CORE: Final = 25.0
# A response costs about 0.3 ms of processor time in model, server and client together, which a CPU executor needs
# itself: whatever runs beside a pass holds the whole pass up. So many a second for each core bound that to a sixtieth
# of the machine; what is held up is joined. Sixteen readers on two cores still see six answers a second each.
_RESPONSES_PER_CORE: Final = 50.0


class ResponseSender(Protocol):
    """Where the answers of one request go."""

    def send(self, arrays: Arrays, *, final: bool) -> None: ...

    def fail(self, code: str, message: str) -> None:
        """Send an error with the final flag."""

    def is_cancelled(self) -> bool: ...


def wire_error(error: Exception) -> tuple[str, str]:
    """Return code and message of an error; streams carry messages only, so the message repeats the code."""
    if isinstance(error, DSparkError):
        return error.code, f"[{error.code}] {error}"
    return "INTERNAL", f"[INTERNAL] {type(error).__name__}: {error}"


class ResponseStream:
    """The answers of one request: takes outputs from any thread, sends them from the outbox's.

    `client_id` is the request id that the client chose (may be empty). `cancelled` turns true when the
    client has gone or asked for it, and stays so.
    """

    def __init__(self, outbox: Outbox, sender: ResponseSender, *, client_id: str = "") -> None:
        self.client_id = client_id
        self.parsed = ParsedRequest()
        self.cancelled = False
        self._outbox = outbox
        self._sender: ResponseSender | None = sender  # None once closed
        # Guarded by the outbox's lock.
        self._pending: list[RequestOutput] = []
        self._queued_for_s: float | None = None  # time of its entry in the outbox's queue
        self._unsent = True  # its first answer never waits
        self._ending = False  # its last output is in _pending or sent
        # Of the outbox thread alone.
        self._echoed = False
        self._log_prob = 0.0  # of what was sent

    def emit(self, output: RequestOutput) -> None:
        """Take one output; never blocks, never raises. What comes after the last one is dropped."""
        self._outbox._take(self, output)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, if it has not ended yet."""
        self.emit(RequestOutput(request_id=-1, error=error))

    def cancel(self) -> None:
        """Ask the engine to end the request at its next step."""
        self.cancelled = True

    def is_cancelled(self) -> bool:
        """Say whether the client has gone; costs nothing (the outbox thread does the asking)."""
        return self.cancelled

    # ---- outbox thread only ----

    def _poll(self) -> None:
        if not self.cancelled and self._sender is not None and self._sender.is_cancelled():
            self.cancelled = True

    def _send(self, outputs: list[RequestOutput]) -> bool:
        """Send what has piled up as one response; return True once the stream is closed."""
        sender = self._sender
        if sender is None:
            return True
        if outputs[-1].final:
            # Triton keeps the request, and with it the model, until its sender is garbage; whoever still holds this
            # stream (a finished sequence, say) must not hold the sender.
            self._sender = None
        try:
            error = outputs[-1].error
            delta = outputs if error is None else outputs[:-1]
            if delta and (error is None or self.parsed.stream):
                arrays = answer_arrays(
                    self.parsed, delta, echo=not self._echoed, log_prob_before=self._log_prob
                )
                self._echoed = True
                self._log_prob += sum(entry.log_prob for output in delta for entry in output.log_probs)
                sender.send(arrays, final=delta[-1].final)
            if error is not None:
                sender.fail(*wire_error(error))
        except Exception as failure:  # this request's own code path: it fails alone
            _log.exception("a response could not be sent; the request is failed")
            self._sender = None
            self.cancelled = True  # the engine need not go on with it
            with contextlib.suppress(Exception):  # then the final flag had left before
                sender.fail(*wire_error(failure))
        return self._sender is None


def answer_arrays(
    parsed: ParsedRequest, outputs: list[RequestOutput], *, echo: bool, log_prob_before: float = 0.0
) -> dict[str, npt.NDArray[np.generic]]:
    """Join consecutive outputs of one request into the arrays of one answer.

    A list is [1, n]. A single value is [1], without a second dimension: what clients of TensorRT-LLM's and of
    vLLM's models read with `as_numpy("text_output")[0].decode()`.

    Arguments:
        outputs: at least one, none with an error.
        echo: put `parsed.echo_text` in front.
        log_prob_before: log probability of the answers before this one.
    """
    token_ids = [token for output in outputs for token in output.token_ids]
    text = "".join(output.text or "" for output in outputs)
    if echo and parsed.echo_text is not None:
        text = parsed.echo_text + text
    values: dict[str, object] = {
        "text_output": text.encode(),
        "output_ids": token_ids,
        "num_input_tokens": len(parsed.prompt_ids),
        "num_output_tokens": len(token_ids),
    }
    if parsed.params.wants_log_probs:
        entries = [entry for output in outputs for entry in output.log_probs]
        values.update(log_prob_values(token_ids, entries, parsed.token_bytes, before=log_prob_before))
    last = outputs[-1]
    if last.finish_reason is not None:
        values["finish_reason"] = last.finish_reason.encode()
        values.update(_perf_values(last.metrics or SpecMetrics()))
    return {
        name: np.array([value], dtype=_NUMPY_TYPES[name])  # a list gives [1, n]
        for name, value in values.items()
        if name in parsed.wanted
    }


def _perf_values(metrics: SpecMetrics) -> dict[str, object]:
    drafted, accepted, steps = (
        metrics.num_draft_tokens,
        metrics.num_accepted_draft_tokens,
        metrics.num_spec_steps,
    )
    acceptance_rate = accepted / drafted if drafted else 0.0
    report = {
        "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": acceptance_rate,
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "acceptance_histogram": list(metrics.acceptance_histogram),
        "seed": metrics.seed,
    }
    return {
        "acceptance_rate": acceptance_rate,
        "total_accepted_draft_tokens": accepted,
        "total_draft_tokens": drafted,
        "kv_cache_alloc_total_blocks": metrics.num_pages,
        "kv_cache_alloc_new_blocks": metrics.num_pages - metrics.num_cached_pages,
        "kv_cache_reused_blocks": metrics.num_cached_pages,
        "arrival_time_ns": metrics.arrival_time_ns,
        "first_scheduled_time_ns": metrics.first_scheduled_time_ns,
        "first_token_time_ns": metrics.first_token_time_ns,
        "last_token_time_ns": metrics.last_token_time_ns,
        "spec_decode_metrics": json.dumps(report).encode(),
    }


class Outbox:
    """Owns every open stream and the thread that sends for them.

    Arguments:
        engine_alive: asked while streams are open; when it says no twice in a row they are all failed (the
            engine fails its own when it dies in an orderly way: this is for when it does not).
        responses_per_s: of all streams together; a stream's outputs are joined to keep to it. The first and the
            last answer of a stream never wait. None = by the number of cores.
    """

    def __init__(self, *, engine_alive: Callable[[], bool], responses_per_s: float | None = None) -> None:
        self._engine_alive = engine_alive
        num_cores = len(os.sched_getaffinity(0))
        self._responses_per_s = responses_per_s or _RESPONSES_PER_CORE * num_cores
        self._most_polls = max(1, round(_POLLS_PER_CORE * _POLL_INTERVAL_S * num_cores))  # at a time
        self._polled: deque[ResponseStream] = deque()  # in the order in which they are polled
        self._wake = threading.Condition()
        self._queue: list[tuple[float, int, ResponseStream]] = []  # heap: when to send, arrival, stream
        self._num_queued = 0
        # When what has piled up is sent next, of all streams at once: one waking of everybody on the way, not one each.
        self._burst_s = 0.0
        self._wakes_s = -math.inf  # when the thread will wake by itself; -inf while it is awake
        self._open: set[ResponseStream] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="dspark-outbox", daemon=True)
        self._thread.start()

    def open(self, sender: ResponseSender, *, client_id: str = "") -> ResponseStream:
        """Open a stream; from now on it will be ended, whatever happens."""
        stream = ResponseStream(self, sender, client_id=client_id)
        with self._wake:
            self._open.add(stream)
            self._polled.append(stream)
            stopping = self._stopping
            self._wake.notify()  # the thread sleeps without a time-out while nothing is open
        if stopping:
            stream.fail(EngineError("the model is being unloaded; send the request again later"))
        return stream

    @property
    def num_open(self) -> int:
        """Streams that have not sent their final flag."""
        return len(self._open)

    def find(self, client_id: str) -> list[ResponseStream]:
        """Return the open streams whose request id the client chose so."""
        with self._wake:
            return [stream for stream in self._open if stream.client_id == client_id]

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Fail what is still open, send everything, stop the thread."""
        with self._wake:
            self._stopping = True
            left = list(self._open)
        for stream in left:
            stream.fail(EngineError("the model was unloaded before the answer was complete"))
        with self._wake:
            self._wake.notify()
        self._thread.join(timeout_s)

    def _take(self, stream: ResponseStream, output: RequestOutput) -> None:
        with self._wake:
            if stream._ending:
                return
            stream._ending = output.final
            stream._pending.append(output)
            # Text that is held back (half a character, perhaps a stop word) travels with what completes it.
            if not (output.final or (stream.parsed.stream and output.text != "")):
                return
            due_s = -math.inf if output.final or stream._unsent else self._burst_s
            if stream._queued_for_s is None or due_s < stream._queued_for_s:
                self._num_queued += 1
                heapq.heappush(self._queue, (due_s, self._num_queued, stream))
                stream._queued_for_s = due_s
                if due_s < self._wakes_s:
                    self._wake.notify()

    def _run(self) -> None:
        next_poll_s = 0.0
        engine_was_alive = True
        while True:
            with self._wake:
                stream = self._next(next_poll_s)
                if stream is None and self._stopping and not self._open:
                    return
                if stream is not None:
                    outputs, stream._pending = stream._pending, []
            if stream is not None and stream._send(outputs):
                with self._wake:
                    self._open.discard(stream)
                    if not self._open:
                        self._polled.clear()
            del stream
            if time.monotonic() >= next_poll_s:
                engine_was_alive = self._poll(engine_was_alive)
                next_poll_s = time.monotonic() + _POLL_INTERVAL_S

    def _next(self, next_poll_s: float) -> ResponseStream | None:
        """Wait for a stream whose time has come; return None when it is time to poll, or to stop."""
        while True:
            now_s = time.monotonic()
            while self._queue and self._queue[0][0] <= now_s:
                due_s, _, stream = heapq.heappop(self._queue)
                if stream._queued_for_s == due_s:  # else it went out earlier, by another entry
                    stream._queued_for_s = None
                    stream._unsent = False
                    if self._burst_s <= now_s:
                        self._burst_s = now_s + len(self._open) / self._responses_per_s
                    return stream
            if self._stopping and not self._open:
                return None
            if self._open and next_poll_s <= now_s:
                return None
            self._wakes_s = min(
                self._queue[0][0] if self._queue else math.inf, next_poll_s if self._open else math.inf
            )
            self._wake.wait(None if self._wakes_s == math.inf else self._wakes_s - now_s)
            self._wakes_s = -math.inf

    def _poll(self, engine_was_alive: bool) -> bool:
        """Look for cancelled clients and a dead engine; return whether the engine lives."""
        alive = self._engine_alive()
        if not alive and not engine_was_alive:
            with self._wake:
                left = list(self._open)
            for stream in left:
                stream.fail(
                    EngineError("the engine has died; see the server's log, and load the model again")
                )
            return alive
        for stream in self._next_polled():
            try:
                stream._poll()
            except Exception as failure:
                _log.exception("is_cancelled failed")
                stream.fail(failure)
        return alive

    def _next_polled(self) -> list[ResponseStream]:
        """Return the streams whose turn it is, without those that end (a cancel that meets the last answer leaks the
        request in the server) or are cancelled already.
        """
        turn: list[ResponseStream] = []
        with self._wake:
            for _ in range(len(self._polled)):
                if len(turn) == self._most_polls:
                    break
                stream = self._polled.popleft()
                if not (stream._ending or stream.cancelled):
                    turn.append(stream)
            self._polled.extend(turn)
        return turn
