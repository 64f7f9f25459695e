"""The Triton model. The only file that imports Triton's Python backend.

`execute` parses and submits, and returns at once; answers leave through the outbox as the engine makes them. Requests
to the model `vllm_model` come in by the `door`, and are the same from there on.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils

from dspark.errors import EngineError, RequestError
from dspark.request import Request, RequestOutput
from dspark.runtime import Runtime, load_runtime
from dspark.sampling.grammar import GrammarCompiler
from dspark.serving.checks import load_checked_config
from dspark.serving.door import HandedRequest, open_door
from dspark.serving.guides import GuideDesk
from dspark.serving.metric_sink import TritonMetricSink
from dspark.serving.parse import ModelLimits, ParsedRequest, parse_request
from dspark.serving.request_log import log_refusal
from dspark.serving.spans import SpanExporter
from dspark.serving.stream import Arrays, Outbox, ResponseStream, wire_error
from dspark.serving.telemetry import MetricsThread, RequestMeter, Telemetry, failure_reason
from dspark.serving.traffic import open_recorder, prepare_folder
from dspark.serving.watch import RunDir, watch_parents

__all__ = ["TritonPythonModel"]

_log = logging.getLogger("dspark.serving")
# Triton calls finalize once no request is open, so there is next to nothing to wait for.
_DRAIN_TIMEOUT_S: Final = 5.0
_SWEEP_INTERVAL_S: Final = 10.0


class TritonSender:
    """One request's response sender, in our terms."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()

    def send(self, arrays: Arrays, *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def fail(self, code: str, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), final=True)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def _send(self, response: Any, *, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(response, flags=flags)


class TritonPythonModel:
    """What Triton's Python backend calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load what model.yaml, the environment, config.pbtxt and the launcher name; the later wins.

        Raises:
            pb_utils.TritonModelException: with the reason, when it cannot be loaded.
        """
        _log_to_triton()
        run_dir = self._run_dir = RunDir.of_environment()
        self._runtime: Runtime | None = None
        watch_parents(run_dir, self, name="serving")
        try:
            overrides = _parameters_of_config(args["model_config"])
            overrides.update({} if run_dir is None else run_dir.overrides)
            version_dir = Path(args["model_repository"]) / args["model_version"]
            config = load_checked_config(version_dir / "model.yaml", overrides, base=version_dir)
            prepare_folder(config.record)
            runtime = load_runtime(config, progress=_log.info, base=version_dir)
        except Exception as error:
            _log.exception("loading failed")
            raise pb_utils.TritonModelException(wire_error(error)[1]) from None
        self._guides = _guide_desk(runtime)
        self._limits = ModelLimits.of(
            vocab_size=runtime.target_config.vocab_size,
            tokenizer=runtime.tokenizer,
            # A cache smaller than one context bounds a sequence, too.
            max_context_len=min(
                runtime.limits.max_context_len, runtime.limits.num_pages * runtime.limits.page_size
            ),
        )
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._sink = TritonMetricSink(pb_utils, labels)
        self._recorder = open_recorder(config, target_hash=runtime.target_config.model_hash)
        self._telemetry = Telemetry(self._sink, runtime.scheduler, self._recorder)
        runtime.engine.watch(self._telemetry.step)
        self._metrics = MetricsThread(self._telemetry, runtime.engine.stats)
        self._spans = SpanExporter.of_environment()
        self._outbox = Outbox(engine_alive=lambda: runtime.engine.alive)
        self._max_request_s = config.max_request_ms / 1e3
        self._runtime = runtime
        self._stopping = threading.Event()
        self._door = open_door(os.getppid(), lambda request: self.execute([request]))
        _set_loaded_apart()
        threading.Thread(target=_sweep, args=(self._stopping,), name="dspark-sweep", daemon=True).start()
        _log.info("ready (process %d)", os.getpid())

    def execute(self, requests: Sequence[Any]) -> None:
        """Parse and submit; every failure becomes that request's own answer."""
        for request in requests:
            sender = request if isinstance(request, HandedRequest) else TritonSender(request)
            stream = self._outbox.open(sender, client_id=request.request_id())
            try:
                self._submit(request, stream)
            except Exception as error:
                self._refuse(stream, error)

    def finalize(self) -> None:
        """Let running requests end, fail the rest, stop the engine."""
        if self._run_dir is not None:
            self._run_dir.process_ends("serving")
        if self._runtime is None:
            return
        if self._door is not None:
            self._door.close()
        self._runtime.engine.drain(_DRAIN_TIMEOUT_S)
        self._runtime.engine.close()
        self._outbox.close()
        if self._guides is not None:
            self._guides.close()
        if self._recorder is not None:
            self._recorder.close()
        self._metrics.close()
        self._sink.close()
        if self._spans is not None:
            self._spans.close()
        self._stopping.set()
        gc.unfreeze()

    def _submit(self, request: Any, stream: ResponseStream) -> None:
        runtime = self._runtime
        if runtime is None:
            raise EngineError("the model is not loaded")
        arrived_s, arrived_ns = time.monotonic(), time.time_ns()
        parsed = parse_request(
            {tensor.name(): _array(tensor) for tensor in request.inputs()},
            json.loads(request.parameters() or "{}"),
            requested_outputs=request.requested_output_names(),
            tokenizer=runtime.tokenizer,
            limits=self._limits,
        )
        stream.parsed = parsed
        if parsed.cancels:
            self._cancel_others(stream)
            return
        asked_s = parsed.timeout_ms / 1e3 or request.timeout() / 1e6  # Triton's own is in microseconds
        timeout_s = min((limit_s for limit_s in (asked_s, self._max_request_s) if limit_s), default=0.0)
        submitted = Request(
            prompt_ids=parsed.prompt_ids,
            params=parsed.params,
            emit=RequestMeter(
                self._telemetry,
                self._emitter(stream, parsed),
                arrived_s=arrived_s,
                client_id=stream.client_id,
                num_input_tokens=len(parsed.prompt_ids),
                trace=self._trace_of(request),
            ),
            is_cancelled=stream.is_cancelled,
            deadline_s=arrived_s + timeout_s if timeout_s else None,
            priority=parsed.priority,
            arrival_time_ns=arrived_ns,
        )
        kind = parsed.params.guided_decoding_guide_type
        if kind is None or self._guides is None:
            runtime.engine.submit(submitted)
        else:
            self._submit_guided(self._guides, kind, submitted, stream)

    def _submit_guided(self, guides: GuideDesk, kind: str, request: Request, stream: ResponseStream) -> None:
        """Submit a request once its guide is compiled; until then it has its place in the engine's queue.

        Raises:
            CapacityError, EngineError: as `EngineThread.submit`.
        """
        assert self._runtime is not None
        engine = self._runtime.engine
        place = engine.hold_place()

        def failed(error: Exception) -> None:
            place.give_back()
            self._refuse(stream, error)

        def over() -> None:
            place.give_back()
            _end_unbegun(request)

        guides.submit(
            kind,
            request.params.guided_decoding_guide,
            then=lambda grammar: engine.submit(replace(request, grammar=grammar), place=place),
            failed=failed,
            is_over=lambda: stream.is_cancelled() or _is_late(request),
            over=over,
        )

    def _emitter(self, stream: ResponseStream, parsed: ParsedRequest) -> Callable[[RequestOutput], None]:
        """Return what takes a request's outputs: its stream, and before it the recorder, where answers are kept."""
        if self._recorder is None:
            return stream.emit
        return self._recorder.listen(stream.emit, prompt_ids=parsed.prompt_ids, params=parsed.params)

    def _refuse(self, stream: ResponseStream, error: Exception) -> None:
        """Answer a request that the engine did not take."""
        if wire_error(error)[0] == "INTERNAL":
            _log.error("a request failed", exc_info=error)
        if self._runtime is not None:
            self._telemetry.failed(failure_reason(error))
        log_refusal(error, client_id=stream.client_id)
        stream.fail(error)

    def _trace_of(self, request: Any) -> Callable[[RequestOutput, dict[str, str | int]], None] | None:
        """Return what takes the end of a request that Triton traces; None where nobody asked for spans."""
        exporter = self._spans
        if exporter is None:
            return None
        context = request.trace().get_context()
        return functools.partial(exporter.ended, context) if context else None

    def _cancel_others(self, stream: ResponseStream) -> None:
        """Cancel what runs under the same request id, and answer at once."""
        if not stream.client_id:
            raise RequestError("stop", True, "true only with the request id of the request to cancel")
        for other in self._outbox.find(stream.client_id):
            if other is not stream:
                other.cancel()
        stream.emit(RequestOutput(request_id=-1, text="", finish_reason="cancelled"))

    def begin_drain(self) -> None:
        """Take no more requests."""
        if self._runtime is not None:
            self._runtime.engine.drain(0.0)

    def stop_running(self) -> None:
        """Fail every open request."""
        if self._runtime is not None:
            self._runtime.engine.close()

    def num_open(self) -> int:
        """Return the number of requests without a final answer."""
        return 0 if self._runtime is None else self._outbox.num_open

    def is_dead(self) -> bool:
        """Say whether it was loaded and its engine has died since."""
        return self._runtime is not None and self._runtime.engine.died


def _guide_desk(runtime: Runtime) -> GuideDesk | None:
    tokenizer = runtime.tokenizer
    if tokenizer is None:
        return None
    return GuideDesk(
        lambda: GrammarCompiler(tokenizer, vocab_size=runtime.target_config.vocab_size),
        prepared=_set_loaded_apart,
    )


def _is_late(request: Request) -> bool:
    return request.deadline_s is not None and time.monotonic() >= request.deadline_s


def _end_unbegun(request: Request) -> None:
    """Answer a request that the engine has not seen, as the engine answers one that it has not begun."""
    late = request.is_cancelled is None or not request.is_cancelled()
    request.emit(RequestOutput(request_id=-1, text="", finish_reason="timeout" if late else "cancelled"))


def _set_loaded_apart() -> None:
    """Take everything that was loaded out of the garbage collector's sight, so that a collection looks at little."""
    gc.collect()
    gc.freeze()


def _sweep(stopping: threading.Event) -> None:
    """Collect garbage now and then.

    A server that frees what it allocates next to never reaches the collector's thresholds, and only a full collection
    empties the interpreter's lists of freed tuples and the like: megabytes that fill up slowly.
    """
    while not stopping.wait(_SWEEP_INTERVAL_S):
        gc.collect()


def _array(tensor: Any) -> np.ndarray[Any, np.dtype[Any]]:
    array: np.ndarray[Any, np.dtype[Any]] = tensor.as_numpy()
    return array


def _parameters_of_config(model_config: str) -> dict[str, object]:
    """Return the settings that config.pbtxt's `parameters` give."""
    parameters = json.loads(model_config).get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}


class _TritonLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        if record.levelno >= logging.ERROR:
            logger.log_error(self.format(record))
        elif record.levelno >= logging.WARNING:
            logger.log_warn(self.format(record))
        else:
            logger.log_info(self.format(record))


def _log_to_triton() -> None:
    """Send this package's log to the server's."""
    log = logging.getLogger("dspark")
    log.handlers = [_TritonLogHandler()]
    log.setLevel(logging.INFO)
    log.propagate = False
