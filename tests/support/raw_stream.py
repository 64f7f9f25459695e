"""Streams at the level of gRPC itself: many on one channel, read as slowly as a test wants, left whenever it wants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.server import tensor

__all__ = ["RawChannel", "ids_of"]

_LIMIT_S = 120.0  # of one stream
_WINDOW_BYTES = 1 << 16  # of one stream; a reader that stops reading stops the server's writes behind so much


class RawChannel:
    """One connection that carries many streams; a context manager."""

    def __init__(self, url: str) -> None:
        options = [
            ("grpc.http2.bdp_probe", 0),  # else the window grows with the traffic
            ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel = grpc.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> RawChannel:
        return self

    def __exit__(self, *_error: object) -> None:
        self._channel.close()

    def stream(
        self, *, request_id: str = "", parameters: dict[str, Any] | None = None, **inputs: Any
    ) -> Iterator[Any]:
        """Send one request; return gRPC's own call: iterate to read, `cancel()` to leave."""
        return self.send(self.message(request_id=request_id, parameters=parameters, **inputs))

    def message(
        self, *, request_id: str = "", parameters: dict[str, Any] | None = None, **inputs: Any
    ) -> Any:
        """Return the request as gRPC sends it."""
        request = service_pb2.ModelInferRequest(model_name="dspark", id=request_id)
        for name, value in inputs.items():
            made = tensor(name, value)
            request.inputs.append(made._get_tensor())
            request.raw_input_contents.append(made._get_content())
        for name, value in (parameters or {}).items():
            kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
            setattr(request.parameters[name], kind, value)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return request

    def send(self, message: Any) -> Iterator[Any]:
        """Send a message as it is, on a stream of its own."""
        call: Iterator[Any] = self._stub.ModelStreamInfer(iter([message]), timeout=_LIMIT_S)
        return call


def ids_of(responses: list[Any]) -> list[int]:
    """Return the token ids of all responses of one stream.

    Raises:
        AssertionError: one of them is an error, or the final flag did not come exactly once, at the end.
    """
    ids: list[int] = []
    for response in responses:
        assert not response.error_message, response.error_message
        answer = response.infer_response
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
            if output.name == "output_ids":
                ids.extend(np.frombuffer(raw, dtype=np.int32).tolist())
    finals = [r.infer_response.parameters["triton_final_response"].bool_param for r in responses]
    assert finals.count(True) == 1 and finals[-1], finals
    return ids
