"""Runs requests on TensorRT-LLM's LLM API behind the doors of `engine.thread.EngineThread`.

Where an answer ends, what of its text may leave, time limits and clients that leave are decided here, by the code that
decides it for our own engine; TensorRT-LLM batches, drafts and verifies. Its event loop runs in one thread of ours.
Unproven: it has met a fake only, whose signatures are those of the public reference (see `tensorrt_llm`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dspark.engine.admission import EngineLimits, check_request, make_sequence
from dspark.engine.commit import append_tokens
from dspark.engine.delivery import client_left, deliver, deliver_last
from dspark.engine.doors import Doors, Place
from dspark.engine.sequence import Sequence
from dspark.engine.stats import EngineStats
from dspark.engine.step_report import StepWatcher
from dspark.errors import DSparkError, EngineError
from dspark.executors.tensorrt_llm import check_sampling, sampling_arguments, token_log_prob
from dspark.models.config import TargetConfig
from dspark.models.tokenizer import Tokenizer
from dspark.request import FinishReason, Request, RequestOutput, TokenLogProb
from dspark.sampling.verification import Verdict

__all__ = ["Generation", "LanguageModel", "TensorRTLLMThread"]

log = logging.getLogger("dspark.engine")

_LOOK_S = 0.05  # how often late requests and clients that left are looked for


class Generation(Protocol):
    """What `LLM.generate_async` gives (`RequestOutput`): each step of iterating brings more tokens."""

    outputs: list[Any]  # CompletionOutput: token_ids, logprobs, finish_reason
    error: str | None  # set where it completed with an error

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def abort(self) -> None: ...


class LanguageModel(Protocol):
    """What is used of `tensorrt_llm.LLM`."""

    def generate_async(
        self, inputs: list[int], sampling_params: Any = None, *, streaming: bool = False
    ) -> Generation: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True)
class _Open:
    """A request that has no final output yet."""

    request: Request
    sequence: Sequence | None = None  # None = not begun
    generation: Generation | None = None
    task: asyncio.Task[None] | None = None


class TensorRTLLMThread(Doors):
    """Serves requests with a language model that was loaded; the same doors as `EngineThread`.

    Arguments:
        model: given away to this thread, which shuts it down.
        make_sampling: its `SamplingParams`.
        target: end tokens and vocabulary.
        tokenizer: None serves token ids only.
        limits: what a request may ask for; pages are the language model's own affair.
        block_size: drafts of a step, 0 = none.
        schedules: its planner cuts blocks, so how many drafts were verified is not known.
        max_queue_size: requests that may wait beside `limits.max_batch_size` running ones.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        make_sampling: Callable[..., Any],
        target: TargetConfig,
        tokenizer: Tokenizer | None,
        limits: EngineLimits,
        block_size: int = 0,
        schedules: bool = False,
        max_queue_size: int = 1024,
    ) -> None:
        self._open: dict[int, _Open] = {}
        thread = threading.Thread(target=self._run, name="dspark-tensorrt-llm", daemon=True)
        super().__init__(thread, self._open, threading.Lock(), max_queue_size=max_queue_size)
        self._model, self._make_sampling = model, make_sampling
        self._target, self._tokenizer, self._limits = target, tokenizer, limits
        self._block_size, self._schedules = block_size, schedules
        self._ids = itertools.count(1)
        self._stats = EngineStats(pages_total=limits.num_pages)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun, self._stop = threading.Event(), asyncio.Event()

    # -- doors ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        self._begun.wait()

    def submit(self, request: Request, *, place: Place | None = None) -> int:
        """Queue a request; return its id.

        Arguments:
            place: held for it.

        Raises:
            RequestError: it can never be served, or asks for what TensorRT-LLM has no words for.
            CapacityError: the queue is full.
            EngineError: the engine is stopped, stopping or dead.
        """
        check_request(
            request,
            vocab_size=self._target.vocab_size,
            limits=self._limits,
            has_tokenizer=self._tokenizer is not None,
        )
        check_sampling(request.params)
        with self._lock:
            self._let_in(place)
            request_id = next(self._ids)
            self._open[request_id] = _Open(request)
            try:
                self._call(self._begin, request_id)
            except RuntimeError as error:  # its loop has just ended
                del self._open[request_id]
                raise EngineError("the engine is stopped and takes no more requests") from error
        return request_id

    def watch(self, watcher: StepWatcher) -> None:
        """Report nothing: the language model tells of no steps."""

    def cancel(self, request_id: int) -> None:
        """End a request; its last output says "cancelled"."""
        with self._lock:
            if not self._stopping and self._thread.is_alive():
                self._call(self._end, request_id, "cancelled")

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        num_open = len(self._open)
        running = min(num_open, self._limits.max_batch_size)
        return replace(self._stats, num_running=running, num_waiting=num_open - running + len(self._places))

    def _num_waiting(self) -> int:
        return len(self._open) - self._limits.max_batch_size

    def close(self) -> None:
        """Stop the thread and shut the language model down; what is open gets an EngineError as its last output."""
        with self._lock:
            if not self._stopping and self._thread.is_alive():
                self._call(self._stop.set)
            self._stopping = True
        self._join()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None, "start comes first"
        self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            log.exception("the thread of TensorRT-LLM died")
            self._death = error
        finally:
            self._begun.set()
            self._fail_open()
            try:
                self._model.shutdown()
            except Exception:
                log.exception("TensorRT-LLM did not shut down")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        while not self._stop.is_set():
            self._end_cancelled_and_late()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _LOOK_S)

    def _fail_open(self) -> None:
        with self._lock:
            self._stopping = True
            left = dict(self._open)
            self._open.clear()
        for one in left.values():
            _abort(one)
        self._fail_all({request_id: one.request for request_id, one in left.items()})

    def _begin(self, request_id: int) -> None:
        one = self._open[request_id]
        try:
            one.sequence = make_sequence(
                one.request,
                sequence_id=request_id,
                root=0,
                limits=self._limits,
                config=self._target,
                tokenizer=self._tokenizer,
                rule="auto",
            )
            sequence = one.sequence
            arguments = sampling_arguments(
                one.request.params, seed=sequence.seed, end_ids=sequence.sampler.end_ids
            )
            sequence.metrics.first_scheduled_time_ns = time.time_ns()
            one.generation = self._model.generate_async(
                list(one.request.prompt_ids), self._make_sampling(**arguments), streaming=True
            )
        except Exception as error:
            self._fail(request_id, error if isinstance(error, DSparkError) else _foreign(error))
            return
        self._stats.num_prompt_tokens += len(one.request.prompt_ids)
        one.task = asyncio.ensure_future(self._stream(request_id, sequence, one.generation))

    async def _stream(self, request_id: int, sequence: Sequence, generation: Generation) -> None:
        """Hand on what comes until the answer ends."""
        try:
            async for _ in generation:
                output = generation.outputs[0]
                self._take(sequence, output)
                if sequence.finished:
                    break
            if not sequence.finished:
                if generation.error is not None:
                    raise EngineError(f"TensorRT-LLM: {generation.error}")
                sequence.finish_reason = generation.outputs[0].finish_reason
            if not sequence.finished:
                raise EngineError("TensorRT-LLM ended the answer without a reason")
        except Exception as error:
            self._open[request_id].task = None  # this one: it ends by itself
            self._fail(request_id, error if isinstance(error, DSparkError) else _foreign(error))
            return
        self._open[request_id].task = None
        self._close(request_id)

    def _take(self, sequence: Sequence, output: Any) -> None:
        """Append the tokens that are new, and hand on what may leave."""
        before = sequence.output_len
        token_ids = tuple(output.token_ids[before:])
        if not token_ids:
            return
        verdict = Verdict(accepted=len(token_ids) - 1, token_ids=token_ids)
        committed, delta = append_tokens(sequence, verdict, max_context_len=self._limits.max_context_len)
        token_ids = token_ids[:committed]
        log_probs = _log_probs(sequence.request, output, before, token_ids)
        self._count(sequence, committed, decoded=before > 0)
        if sequence.finished:  # these leave with the last output
            sequence.last_delta, sequence.last_log_probs = (token_ids, delta), log_probs
            return
        deliver(
            sequence,
            RequestOutput(
                request_id=sequence.sequence_id, token_ids=token_ids, text=delta, log_probs=log_probs
            ),
        )

    def _count(self, sequence: Sequence, committed: int, *, decoded: bool) -> None:
        """Count tokens; one response behind the first is one step of drafts and one token of the target."""
        metrics, stats, now_ns = sequence.metrics, self._stats, time.time_ns()
        metrics.last_token_time_ns = now_ns
        metrics.first_token_time_ns = metrics.first_token_time_ns or now_ns
        stats.num_generation_tokens += committed
        if not (decoded and self._block_size):
            return
        accepted, verified = committed - 1, 0 if self._schedules else self._block_size
        metrics.num_spec_steps += 1
        metrics.num_draft_tokens += verified
        metrics.num_accepted_draft_tokens += accepted
        metrics.acceptance_histogram.extend([0] * (committed - len(metrics.acceptance_histogram)))
        metrics.acceptance_histogram[accepted] += 1
        stats.num_spec_steps += 1
        stats.num_proposed_tokens += self._block_size
        stats.num_draft_tokens += verified
        stats.num_accepted_tokens += accepted

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end_cancelled_and_late(self) -> None:
        now_s = time.monotonic()
        for request_id, one in tuple(self._open.items()):
            if one.sequence is None:
                continue
            deadline_s = one.request.deadline_s
            if client_left(one.sequence):
                self._end(request_id, "cancelled")
            elif deadline_s is not None and now_s >= deadline_s:
                self._end(request_id, "timeout")

    def _end(self, request_id: int, reason: FinishReason) -> None:
        """End a request that runs; one that has ended is no error."""
        one = self._open.get(request_id)
        if one is None or one.sequence is None:
            return
        one.sequence.finish_reason = reason
        self._stats.num_cancelled += reason == "cancelled"
        self._close(request_id)

    def _fail(self, request_id: int, error: Exception) -> None:
        one = self._open.get(request_id)
        if one is None:
            return
        self._stats.num_failed += 1
        if one.sequence is None:
            del self._open[request_id]
            one.request.emit(RequestOutput(request_id=request_id, error=error))
            return
        one.sequence.finish_reason, one.sequence.error = None, error
        self._close(request_id)

    def _close(self, request_id: int) -> None:
        """Stop the generation where it runs on, and send the last output."""
        one = self._open.pop(request_id)
        assert one.sequence is not None
        _abort(one)
        deliver_last(one.sequence)


def _foreign(error: Exception) -> EngineError:
    return EngineError(f"TensorRT-LLM: {type(error).__name__}: {str(error)[:300]}")


def _abort(one: _Open) -> None:
    if one.generation is None:
        return
    if one.task is not None and not one.task.done():
        one.task.cancel()
    outputs = one.generation.outputs
    if not outputs or outputs[0].finish_reason is None:
        try:
            one.generation.abort()
        except Exception:
            log.exception("TensorRT-LLM did not abort a request")


def _log_probs(
    request: Request, output: Any, start: int, token_ids: Iterable[int]
) -> tuple[TokenLogProb, ...]:
    if not request.params.wants_log_probs:
        return ()
    return tuple(
        token_log_prob(output.logprobs[start + index], token, num_alternatives=request.params.logprobs)
        for index, token in enumerate(token_ids)
    )
