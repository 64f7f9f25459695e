"""One connection to a dspark model over gRPC: send a prompt, iterate over what comes back.

Hides tritonclient's threading: its callback only fills a queue, and everything else happens in the caller's
thread.
"""

from __future__ import annotations

import contextlib
import json
import queue
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

__all__ = [
    "Answer",
    "Connection",
    "Delta",
    "Generation",
    "Message",
    "RequestFailedError",
    "ServerUnavailableError",
]

Message = Mapping[str, str]  # role and content

# Option name -> wire type; the names are the wire contract's.
_OPTION_TYPES: Final[dict[str, str]] = {
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "seed": "UINT64",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "ignore_eos": "BOOL",
    "num_draft_tokens": "INT32",
    "timeout_ms": "INT32",
}
_NUMPY_TYPES: Final[dict[str, type]] = {
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "BYTES": np.object_,
}
_RETURNS: Final = (
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_finish_reason",
    "return_perf_metrics",
)


class ServerUnavailableError(Exception):
    """Nobody answers at this address, or the model is not ready."""


class RequestFailedError(Exception):
    """The server refused this request or could not finish it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Answer:
    """A whole answer and how it was made. Seconds are the client's own, from sending the request on."""

    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_input_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    tokens_per_second: float = 0.0  # after the first delta
    metrics: dict[str, Any] = field(default_factory=dict)  # the server's spec_decode_metrics

    @property
    def accepted_len(self) -> float:
        """Tokens committed per speculative step, the target's own included."""
        return float(self.metrics.get("mean_acceptance_length", 1.0))

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "output_ids": self.output_ids,
            "finish_reason": self.finish_reason,
            "num_input_tokens": self.num_input_tokens,
            "num_output_tokens": len(self.output_ids),
            "first_token_s": round(self.first_token_s, 6),
            "total_s": round(self.total_s, 6),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "accepted_len": round(self.accepted_len, 4),
            "seed": self.metrics.get("seed"),
            "spec_decode_metrics": self.metrics,
        }


class Connection:
    """A connection to one model; a context manager. One answer at a time.

    Arguments:
        url: host:port of the server's gRPC service.
        model: name of the model.
        timeout_s: longest time one answer may take; it also ends a wait for a server whose model process was
            lost.
    """

    def __init__(self, url: str, *, model: str = "dspark", timeout_s: float = 600.0) -> None:
        self.url = url
        self.model = model
        self.timeout_s = timeout_s
        try:
            self._client = grpc_client.InferenceServerClient(url)
        except Exception as error:
            raise ServerUnavailableError(f"{url} is no address of a server: {error}") from None
        self._streaming = False

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stop_stream(cancel=True)
        self._client.close()

    def check_ready(self) -> None:
        """Return when the model can be asked.

        Raises:
            ServerUnavailableError: saying what is missing and what to do.
        """
        try:
            if not self._client.is_server_live(client_timeout=5.0):
                raise ServerUnavailableError(f"the server at {self.url} is not live")
            if not self._client.is_model_ready(self.model, client_timeout=5.0):
                raise ServerUnavailableError(
                    f"the server at {self.url} has no model {self.model!r} that is ready (still loading?)"
                )
        except InferenceServerException:
            raise ServerUnavailableError(
                f"no server answers at {self.url}; start one with `dspark serve`, or name another with --url"
            ) from None

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        stream: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> Generation:
        """Send one request and return its answer, to be iterated over.

        Arguments:
            prompt: text, or chat messages, to which the model's own chat template is applied.
            options: sampling options under the wire contract's names; None values are not sent.

        Raises:
            RequestFailedError: an option the client does not know.
        """
        inputs = [
            _tensor("text_input", "BYTES", [prompt])
            if isinstance(prompt, str)
            else _tensor("messages", "BYTES", [json.dumps([dict(message) for message in prompt])]),
            _tensor("stream", "BOOL", [stream]),
            *(_tensor(name, "BOOL", [True]) for name in _RETURNS),
        ]
        for name, value in (options or {}).items():
            if name not in _OPTION_TYPES:
                raise RequestFailedError(f"{name}: no such option; known are {', '.join(_OPTION_TYPES)}")
            if value is not None:
                inputs.append(
                    _tensor(name, _OPTION_TYPES[name], value if isinstance(value, list | tuple) else [value])
                )
        return Generation(self, inputs)

    # ---- for Generation ----

    def _start_stream(self, received: queue.SimpleQueue[tuple[Any, Any]], inputs: list[Any]) -> None:
        if self._streaming:
            raise RequestFailedError(
                "this connection is already answering; finish or cancel that answer first"
            )

        def callback(result: Any, error: Any) -> None:
            received.put((result, error))

        self._client.start_stream(callback, stream_timeout=self.timeout_s)
        self._streaming = True
        with contextlib.suppress(
            InferenceServerException
        ):  # a stream that broke says why through the callback
            self._client.async_stream_infer(
                self.model, inputs, request_id=uuid.uuid4().hex, enable_empty_final_response=True
            )

    def _stop_stream(self, *, cancel: bool) -> None:
        if self._streaming:
            self._streaming = False
            self._client.stop_stream(cancel_requests=cancel)

    def _failure(self, error: InferenceServerException) -> Exception:
        message, status = str(error.message()), str(error.status())
        if "DEADLINE_EXCEEDED" in status:
            return RequestFailedError(f"no answer within {self.timeout_s:g} s (--timeout)")
        if "UNAVAILABLE" in status:
            return ServerUnavailableError(f"the server at {self.url} went away or does not answer: {message}")
        return RequestFailedError(message)


class Generation:
    """An answer in the making: iterate over its deltas, then read `answer`.

    Closing the iterator early, or `cancel`, ends the request at the server.
    """

    def __init__(self, connection: Connection, inputs: list[Any]) -> None:
        self.answer = Answer()
        self._connection = connection
        self._inputs = inputs

    def __iter__(self) -> Generator[Delta, None, None]:
        """Yield deltas as they come, to the end.

        Raises:
            RequestFailedError, ServerUnavailableError
        """
        received: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        started_s = time.perf_counter()
        self._connection._start_stream(received, self._inputs)
        finished = False
        first_len = 0  # tokens of the first delta
        try:
            while not finished:
                result, error = received.get()
                now_s = time.perf_counter() - started_s
                if error is not None:
                    finished = True  # an error carries the final flag
                    raise self._connection._failure(error) from None
                finished = result.get_response().parameters["triton_final_response"].bool_param
                delta = self._read(result)
                if delta is None:
                    continue
                if not first_len:
                    self.answer.first_token_s, first_len = now_s, len(delta.token_ids)
                self.answer.total_s = now_s
                yield delta
        finally:
            # A cancel that meets the last answer leaks the request in the server: never cancel after it.
            self._connection._stop_stream(cancel=not finished)
        self._rate(first_len)

    def run(self) -> Answer:
        """Read the answer to its end and return it. Raises as `__iter__` does."""
        with contextlib.closing(iter(self)) as deltas:
            for _delta in deltas:
                pass
        return self.answer

    def cancel(self) -> None:
        """Stop the answer; the server frees what it held for it."""
        self._connection._stop_stream(cancel=True)

    def _read(self, result: Any) -> Delta | None:
        """Add one response to the answer; return its delta, None for an empty final response."""
        text = result.as_numpy("text_output")
        if text is None:
            return None
        ids = result.as_numpy("output_ids")
        delta = Delta(text.ravel()[0].decode("utf-8"), tuple(int(token) for token in ids.ravel()))
        self.answer.text += delta.text
        self.answer.output_ids.extend(delta.token_ids)
        self.answer.num_input_tokens = int(result.as_numpy("num_input_tokens").ravel()[0])
        reason = result.as_numpy("finish_reason")
        if reason is not None:
            self.answer.finish_reason = reason.ravel()[0].decode()
            self.answer.metrics = json.loads(result.as_numpy("spec_decode_metrics").ravel()[0])
            if first := int(result.as_numpy("first_token_time_ns").ravel()[0]):
                self._server_rate(first, int(result.as_numpy("last_token_time_ns").ravel()[0]))
        return delta

    def _server_rate(self, first_ns: int, last_ns: int) -> None:
        if last_ns > first_ns:
            self.answer.tokens_per_second = (len(self.answer.output_ids) - 1) / ((last_ns - first_ns) / 1e9)

    def _rate(self, first_len: int) -> None:
        """Count the rate by this clock where deltas came one by one; else the server's stamps stand."""
        rest = len(self.answer.output_ids) - first_len
        lasted_s = self.answer.total_s - self.answer.first_token_s
        if rest > 0 and lasted_s > 0:
            self.answer.tokens_per_second = rest / lasted_s


def _tensor(name: str, wire_type: str, values: Sequence[Any]) -> Any:
    """Return an input of shape [1, n]."""
    if wire_type == "BYTES":
        values = [value.encode("utf-8", "surrogateescape") for value in values]
    dtype: np.dtype[Any] = np.dtype(_NUMPY_TYPES[wire_type])
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        if not all(isinstance(value, int) and low <= value <= high for value in values):
            raise RequestFailedError(
                f"{name}: got {values[0]!r}, allowed is a whole number from {low} to {high}"
            )
    try:
        array: npt.NDArray[Any] = np.array([list(values)], dtype=dtype)
    except (ValueError, TypeError) as error:
        raise RequestFailedError(f"{name}: got {values[0]!r}, which is no {wire_type} ({error})") from None
    tensor = grpc_client.InferInput(name, list(array.shape), wire_type)
    tensor.set_data_from_numpy(array)
    return tensor
