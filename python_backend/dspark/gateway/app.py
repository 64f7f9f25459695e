"""The HTTP side: routes, server-sent events, clients that leave.

POST /v1/chat/completions   POST /v1/completions   GET /v1/models   GET /v1/models/{id}   GET /health
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from dspark.gateway.answers import Choice, usage_of
from dspark.gateway.errors import ApiError
from dspark.gateway.requests import Ask, parse_chat, parse_completion
from dspark.gateway.triton import Model, Part

__all__ = ["make_app", "trace_headers"]

_log = logging.getLogger("dspark.gateway")
Result = TypeVar("Result")
_TRACE_HEADERS: Final = ("traceparent", "tracestate")  # W3C's
_MOST_BYTES: Final = 16 << 20  # of a request's body
_MOST_TRACE_BYTES: Final = 8 << 10  # of one header
_GATEWAY_FAILED: Final = ApiError(500, "the gateway failed; see its log")


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace headers that gRPC can carry: printable ASCII, at most 8 KiB each; others are left out."""
    found = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
    return {
        name: value
        for name, value in found.items()
        if value.isascii() and value.isprintable() and len(value) <= _MOST_TRACE_BYTES
    }


def make_app(url: str, *, model_name: str) -> Starlette:
    """Return the application.

    Arguments:
        url: host:port of the server's gRPC service.
        model_name: what clients call the model.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.model = Model(url)
        app.state.model_name = model_name
        app.state.started = int(time.time())
        yield
        await app.state.model.close()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", _chat, methods=["POST"]),
            Route("/v1/completions", _completion, methods=["POST"]),
            Route("/v1/models", _models),
            Route("/v1/models/{name:path}", _models),
            Route("/health", _health),
        ],
        exception_handlers={
            ApiError: _api_error,
            ClientDisconnect: _nobody_there,
            404: _not_found,
            405: _not_found,
            Exception: _fault,
        },
        lifespan=lifespan,
    )


async def _chat(request: Request) -> Response:
    return await _complete(request, parse_chat, "chat.completion", "chatcmpl")


async def _completion(request: Request) -> Response:
    return await _complete(request, parse_completion, "text_completion", "cmpl")


async def _models(request: Request) -> Response:
    state = request.app.state
    entry = {"id": state.model_name, "object": "model", "created": state.started, "owned_by": "dspark"}
    name = request.path_params.get("name")
    if name is None:
        return JSONResponse({"object": "list", "data": [entry]})
    _check_model(name, state.model_name)
    return JSONResponse(entry)


async def _health(request: Request) -> Response:
    ready = await request.app.state.model.is_ready()
    return Response(status_code=200 if ready else 503)


async def _complete(request: Request, parse: Callable[[object], Ask], kind: str, prefix: str) -> Response:
    ask = parse(await _body(request))
    state = request.app.state
    _check_model(ask.model, state.model_name)
    head = {
        "id": request.headers.get("x-request-id") or f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": state.model_name,
    }
    chat = kind == "chat.completion"
    choices = [Choice(ask=ask, index=index, chat=chat) for index in range(len(ask.prompts) * ask.num_choices)]
    trace = trace_headers(request.headers)
    parts = _parts(state.model, ask, request_id=str(head["id"]), headers=trace)
    if ask.stream:
        # What is refused is refused before the answer begins, as a status.
        first = await _unless_disconnected(request, _first(parts))
        if chat:
            head["object"] = "chat.completion.chunk"
        return _EventStream(
            _events(head, ask, choices, first, parts),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )
    await _unless_disconnected(request, _collect(choices, parts))
    return JSONResponse(
        {
            **head,
            "choices": [choice.whole() for choice in choices],
            "usage": usage_of(choices, num_choices=ask.num_choices),
        }
    )


async def _body(request: Request) -> object:
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MOST_BYTES:
            raise ApiError(413, f"the body is longer than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _check_model(name: str, served: str) -> None:
    if name != served:
        raise ApiError(
            404,
            f"The model `{name}` does not exist; this server has `{served}`",
            param="model",
            code="model_not_found",
        )


# ---- the answers -----------------------------------------------------------------------------------------


async def _parts(
    model: Model, ask: Ask, *, request_id: str, headers: Mapping[str, str]
) -> AsyncGenerator[tuple[int, Part]]:
    """Ask for all answers at once; yield (choice, part) as they come. Leaving early cancels all of them."""
    arrived: asyncio.Queue[tuple[int, Part | BaseException | None]] = asyncio.Queue()

    async def follow(index: int) -> None:
        prompt = ask.prompts[index // ask.num_choices]
        sampling = dict(ask.sampling)
        if ask.seed is not None:
            sampling["seed"] = (ask.seed + index % ask.num_choices) % 2**64
        if ask.log_probs is not None:
            sampling.update(return_logprobs=True, logprobs=ask.log_probs)
        try:
            answers = model.answer(
                prompt, sampling, stream=ask.stream, request_id=request_id, headers=headers
            )
            async with contextlib.aclosing(answers) as answer:
                async for part in answer:
                    await arrived.put((index, part))
            await arrived.put((index, None))
        except Exception as error:
            await arrived.put((index, error))

    tasks = [asyncio.create_task(follow(index)) for index in range(len(ask.prompts) * ask.num_choices)]
    try:
        left = len(tasks)
        while left:
            index, what = await arrived.get()
            if isinstance(what, BaseException):
                raise what
            if what is None:
                left -= 1
            else:
                yield index, what
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(parts: AsyncGenerator[tuple[int, Part]]) -> tuple[int, Part]:
    return await anext(parts)


async def _collect(choices: list[Choice], parts: AsyncIterator[tuple[int, Part]]) -> None:
    async for index, part in parts:
        choices[index].take(part)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work and return what it gives; when the client leaves first, cancel it.

    Raises:
        ClientDisconnect: the client has left.
    """

    async def left() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.1)

    working, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _events(
    head: dict[str, Any],
    ask: Ask,
    choices: list[Choice],
    first: tuple[int, Part],
    parts: AsyncGenerator[tuple[int, Part]],
) -> AsyncIterator[str]:
    """Yield server-sent events; an error on the way is an event, too, since the status has left.

    Raises:
        _CutShortError: behind that event.
    """
    more = {"usage": None} if ask.include_usage else {}
    try:
        index, part = first
        while True:
            streamed = choices[index].take(part)
            if streamed is not None:
                yield _event({**head, "choices": [streamed], **more})
            try:
                index, part = await anext(parts)
            except StopAsyncIteration:
                break
        if ask.include_usage:
            yield _event({**head, "choices": [], "usage": usage_of(choices, num_choices=ask.num_choices)})
        yield "data: [DONE]\n\n"
    except Exception as error:
        if not isinstance(error, ApiError):
            _log.exception("an answer failed on the way")
            error = _GATEWAY_FAILED
        yield _event(error.body())
        raise _CutShortError from None
    finally:
        await parts.aclose()


class _CutShortError(Exception):
    """An answer failed amid its events; the client has been told."""


class _EventStream(StreamingResponse):
    """A stream that ends as an HTTP answer does only when it was complete.

    Where it failed, the end of the body is never sent and the connection is closed, so that nobody, a proxy or a
    client that skips unknown events, takes what there is for all of it.
    """

    async def stream_response(self, send: Send) -> None:
        with contextlib.suppress(_CutShortError):
            await super().stream_response(send)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


# ---- errors ----------------------------------------------------------------------------------------------


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"{request.method} {request.url.path}: no such endpoint here"
    return JSONResponse(ApiError(status, message).body(), status_code=status)


async def _fault(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(_GATEWAY_FAILED.body(), status_code=500)
