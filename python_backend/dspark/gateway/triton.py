"""The gateway's side of the wire contract: one gRPC stream per answer, cancelled when nobody reads it any more."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import numpy as np
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from dspark.gateway.errors import from_wire, refused, unreachable
from dspark.serving.contract import MODEL_NAME

__all__ = ["Model", "Part", "TokenFigures"]

_RETURNS: Final = ("return_num_input_tokens", "return_num_output_tokens", "return_finish_reason")


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Log probability of one token."""

    raw: bytes
    log_prob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One response: a delta of the answer, or all of it. `log_probs` holds, per token, its own and the likeliest."""

    text: str
    num_input_tokens: int
    num_output_tokens: int
    finish_reason: str | None = None
    log_probs: list[tuple[TokenFigures, list[TokenFigures]]] = field(default_factory=list)


class Model:
    """The model behind the gateway.

    Arguments:
        url: host:port of the server's gRPC service.
    """

    def __init__(self, url: str) -> None:
        self._client = grpc_aio.InferenceServerClient(url)

    async def close(self) -> None:
        await self._client.close()

    async def is_ready(self) -> bool:
        """Ask the server whether the model answers."""
        try:
            return bool(await self._client.is_model_ready(MODEL_NAME, client_timeout=2.0))
        except InferenceServerException:
            return False

    async def answer(
        self,
        prompt: Mapping[str, object],
        sampling: Mapping[str, object],
        *,
        stream: bool,
        request_id: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Part]:
        """Send one request and yield what comes back; leaving early cancels it.

        Arguments:
            prompt: the prompt's fields; texts travel as tensors.
            sampling: everything else, under the contract's names.
            request_id: stands in the server's log.
            headers: gRPC metadata: the trace that this request belongs to.

        Raises:
            ApiError: refused, failed, or nobody there.
        """
        texts = {name: value for name, value in prompt.items() if isinstance(value, str)}
        rest = {name: value for name, value in prompt.items() if name not in texts}
        inputs = [_tensor(name, "BYTES", _utf8(name, text)) for name, text in texts.items()]
        inputs.append(_tensor("sampling_parameters", "BYTES", json.dumps({**sampling, **rest}).encode()))
        inputs += [_tensor(name, "BOOL", True) for name in _RETURNS]
        inputs.append(_tensor("stream", "BOOL", stream))

        async def request() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": MODEL_NAME,
                "inputs": inputs,
                "request_id": request_id,
                "enable_empty_final_response": True,
            }

        responses = self._client.stream_infer(request(), headers=dict(headers or {}))
        final = False
        try:
            async for result, error in responses:
                if error is not None:
                    final = True
                    raise from_wire(str(error.message()))
                response = result.get_response()
                final = response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield _part(result)
            if not final:
                raise unreachable("the connection ended before the answer did")
        except InferenceServerException as error:
            final = True
            raise unreachable(str(error.message())) from None
        except grpc.RpcError as error:
            final = True
            raise unreachable(str(error.details())) from None
        finally:
            # A cancel that meets the last answer leaks the request in the server.
            if not final:
                responses.cancel()


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise refused(name, text, f"valid Unicode text ({error.reason})") from None


def _tensor(name: str, kind: str, value: object) -> Any:
    made = grpc_aio.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.array([[value]], dtype=np.object_ if kind == "BYTES" else np.bool_))
    return made


def _part(result: Any) -> Part:
    def first(name: str) -> Any:
        array = result.as_numpy(name)
        return None if array is None else array.ravel()[0]

    reason, rows = first("finish_reason"), first("logprobs")
    return Part(
        text=first("text_output").decode(),
        num_input_tokens=int(first("num_input_tokens")),
        num_output_tokens=int(first("num_output_tokens")),
        finish_reason=None if reason is None else reason.decode(),
        log_probs=[] if rows is None else [_figures(row) for row in json.loads(rows)],
    )


def _figures(row: dict[str, dict[str, Any]]) -> tuple[TokenFigures, list[TokenFigures]]:
    """Return a token's own figures, and those of the likeliest in their order."""
    entries = [
        (entry["rank"], TokenFigures(bytes(entry["bytes"]), float(entry["logprob"])))
        for entry in row.values()
    ]
    own = entries[0][1]
    return own, [figures for _, figures in sorted(entries, key=lambda entry: entry[0])]
