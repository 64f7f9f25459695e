"""Gathers what the metrics tell, off the engine's path, and writes it a few times a second.

The engine thread appends one report a step, and a request two or three numbers in its life; everything else
happens in the thread that calls `flush`. A histogram takes its values one by one, at some 20 us each in model
and server, so a flush writes at most so many of each, evenly spaced among those that came: the shape holds,
and the counters beside them stay exact. Knows neither Triton nor the engine's inside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from dspark.engine.stats import EngineStats
from dspark.engine.step_report import StepReport
from dspark.errors import DSparkError
from dspark.request import RequestOutput
from dspark.scheduling.interface import Calibrator, Float64, Scheduler, StepObservation
from dspark.serving.metrics import PHASES, MetricSink
from dspark.serving.request_log import log_end
from dspark.serving.traffic import TrafficRecorder

__all__ = ["MetricsThread", "RequestMeter", "Telemetry"]

_log = logging.getLogger("dspark.serving")
_MOST_VALUES: Final = 8  # of one histogram series and flush
_MOST_STEPS: Final = 2  # whose phases are written in one flush
_MOST_PENDING: Final = 1 << 16  # a flush that never comes must not eat the memory
_LEARNED_EVERY_S: Final = 1.0
_RELIABILITY_EVERY_S: Final = 5.0
_NUM_BINS: Final = 10  # of the reliability diagram
_NONE: Final = np.empty(0, np.int32)

# Counter -> field of the engine's own counters.
_COUNTERS: Final = {
    "dspark_spec_decode_num_drafts_total": "num_spec_steps",
    "dspark_spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "dspark_spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
    "dspark_steps_total": "num_steps",
    "dspark_preemptions_total": "num_preemptions",
    "dspark_drafter_faults_total": "num_drafter_faults",
    "dspark_prompt_tokens_total": "num_prompt_tokens",
    "dspark_cached_prompt_tokens_total": "num_cached_prompt_tokens",
    "dspark_generation_tokens_total": "num_generation_tokens",
}


class Telemetry:
    """See the module's text.

    Arguments:
        sink: where metrics go; used by the flushing thread alone.
        scheduler: the scheduler, asked from the engine thread for what it has learned.
        recorder: counts the answers it keeps; None = nothing is kept.
    """

    def __init__(
        self,
        sink: MetricSink,
        scheduler: Scheduler | None = None,
        recorder: TrafficRecorder | None = None,
    ) -> None:
        self._sink = sink
        self._scheduler = scheduler
        self._recorder = recorder
        self._steps: deque[StepReport] = deque(maxlen=_MOST_PENDING)
        self._seconds: deque[tuple[str, float]] = deque(maxlen=_MOST_PENDING)  # histogram, value
        self._ended: deque[str] = deque(maxlen=_MOST_PENDING)
        self._learned: tuple[float, Float64] | None = None
        self._next_learned_s = 0.0
        self._reliability = _Reliability()
        self._next_reliability_s = 0.0
        self._written: dict[str, float] = {}  # counters of the engine and gauges, as of the last flush

    # ---- engine thread, or whichever thread a request ends in ----

    def step(self, report: StepReport) -> None:
        """Take one step's report."""
        self._steps.append(report)
        now_s = time.monotonic()
        if self._scheduler is not None and now_s >= self._next_learned_s:
            self._next_learned_s = now_s + _LEARNED_EVERY_S
            model, calibrator = self._scheduler.cost_model, self._scheduler.calibrator
            self._learned = (
                model.error if model is not None else float("nan"),
                calibrator.ece() if calibrator is not None else np.empty(0),
            )

    def seconds(self, name: str, value: float) -> None:
        """Take one value of a request's histogram."""
        self._seconds.append((name, value))

    def completed(self) -> None:
        """Count a request that ended with stop or length."""
        self._ended.append("completed")

    def cancelled(self) -> None:
        """Count a request whose client left or asked to stop."""
        self._ended.append("cancelled")

    def failed(self, reason: str) -> None:
        """Count a request that failed; `reason` is a wire code in lower case, or "timeout"."""
        self._ended.append(reason)

    # ---- flushing thread ----

    def flush(self, stats: EngineStats) -> None:
        """Write what has come since the last flush, and the gauges that have changed."""
        self._write_counters(stats)
        self._gauge("dspark_num_requests_running", stats.num_running)
        self._gauge("dspark_num_requests_waiting", stats.num_waiting)
        self._gauge("dspark_kv_cache_usage", stats.pages_held / max(stats.pages_total, 1))
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        if steps:
            self._write_steps(steps)
        self._write_requests()
        if self._learned is not None:
            error, ece = self._learned
            if not np.isnan(error):
                self._gauge("dspark_cost_model_error", error)
            for position in np.flatnonzero(~np.isnan(ece)).tolist():
                self._gauge("dspark_calibration_ece", float(ece[position]), position=str(position))

    def _write_counters(self, stats: EngineStats) -> None:
        for name, field in _COUNTERS.items():
            self._count_up_to(name, getattr(stats, field))
        self._count_up_to(
            "dspark_spec_trimmed_tokens_total", stats.num_proposed_tokens - stats.num_draft_tokens
        )
        if self._recorder is not None:
            self._count_up_to("dspark_recorded_answers_total", self._recorder.num_recorded)
            self._count_up_to("dspark_unrecorded_answers_total", self._recorder.num_dropped)

    def _write_steps(self, steps: list[StepReport]) -> None:
        decoded = [step.observation for step in steps if step.observation is not None]
        accepted = np.concatenate([step.accepted for step in decoded] or [_NONE])
        verify_len = np.concatenate([step.verify_len for step in decoded] or [_NONE])
        self._add("dspark_spec_verify_tokens_total", len(verify_len) + int(verify_len.sum()))
        reached = np.bincount(accepted, minlength=1)[::-1].cumsum()[
            ::-1
        ]  # [k] = blocks with k or more accepted
        for position, count in enumerate(reached[1:].tolist()):
            self._add("dspark_spec_decode_num_accepted_tokens_per_pos_total", count, position=str(position))
        for length in _spread(verify_len.tolist(), _MOST_VALUES):
            self._sink.observe("dspark_verify_len", float(length))
        for step in _spread(steps, _MOST_STEPS):
            for phase in PHASES:
                self._sink.observe("dspark_step_seconds", getattr(step, f"{phase}_s"), phase=phase)
        self._reliability.add(decoded, None if self._scheduler is None else self._scheduler.calibrator)
        if time.monotonic() >= self._next_reliability_s:
            self._next_reliability_s = time.monotonic() + _RELIABILITY_EVERY_S
            self._reliability.write(self._sink)

    def _write_requests(self) -> None:
        by_name: dict[str, list[float]] = {}
        for _ in range(len(self._seconds)):
            name, value = self._seconds.popleft()
            by_name.setdefault(name, []).append(value)
        for name, values in by_name.items():
            for value in _spread(values, _MOST_VALUES):
                self._sink.observe(name, value)
        ended: dict[str, int] = {}
        for _ in range(len(self._ended)):
            how = self._ended.popleft()
            ended[how] = ended.get(how, 0) + 1
        for how, count in ended.items():
            if how in ("completed", "cancelled"):
                self._add(f"dspark_requests_{how}_total", count)
            else:
                self._add("dspark_requests_failed_total", count, reason=how)

    def _count_up_to(self, name: str, total: float) -> None:
        before = self._written.get(name, 0.0)
        if total > before:
            self._sink.increment(name, total - before)
            self._written[name] = total

    def _add(self, name: str, amount: float, **labels: str) -> None:
        if amount > 0:
            self._sink.increment(name, float(amount), **labels)

    def _gauge(self, name: str, value: float, **labels: str) -> None:
        key = name + "".join(labels.values())
        if self._written.get(key) != value:
            self._sink.set(name, float(value), **labels)
            self._written[key] = value


class _Reliability:
    """Adds up, by bin of forecast confidence, the drafts whose fate was seen."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, _NUM_BINS))  # drafts, sum of the forecasts, accepted

    def add(self, steps: list[StepObservation], calibrator: Calibrator | None) -> None:
        for step in _spread([s for s in steps if s.confidence_logits is not None], _MOST_VALUES):
            assert step.confidence_logits is not None
            logits = step.confidence_logits
            if calibrator is not None:
                forecast = calibrator.confidence(logits, sampled=step.sampled)
            else:
                forecast = 0.5 + 0.5 * np.tanh(0.5 * logits.astype(np.float64))
            at = np.arange(logits.shape[1])
            # Seen: the accepted ones, and the one behind them where it was verified. Of altered requests, and trees
            # (whose accepted nodes are no prefix), nobody learns, and forecasts say nothing of the calibrator.
            seen = (at <= step.accepted[:, None]) & (at < step.verify_len[:, None]) & np.isfinite(forecast)
            seen &= ~step.altered[:, None]
            hit = (at < step.accepted[:, None])[seen]
            place = np.minimum((forecast[seen] * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
            for total, weights in zip(self._sums, (None, forecast[seen], hit), strict=True):
                total += np.bincount(place, weights=weights, minlength=_NUM_BINS)

    def write(self, sink: MetricSink) -> None:
        for index in np.flatnonzero(self._sums[0]).tolist():
            for name, total in zip(("drafts", "confidence", "accepted"), self._sums, strict=True):
                if total[index] > 0:
                    sink.increment(f"dspark_reliability_{name}_total", float(total[index]), bin=str(index))
        self._sums[:] = 0.0


class RequestMeter:
    """Stands between the engine and one request's stream, and reads the clock.

    Arguments:
        emit: the stream's.
        arrived_s: when the request came, on time.monotonic()'s clock.
        client_id: the request id that the client chose.
        num_input_tokens: of the prompt.
        trace: told how the request ended: its last output, and what is known beside it.
    """

    __slots__ = (
        "_arrived_s",
        "_client_id",
        "_emit",
        "_first_s",
        "_num_input_tokens",
        "_num_tokens",
        "_telemetry",
        "_trace",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        emit: Callable[[RequestOutput], None],
        *,
        arrived_s: float,
        client_id: str = "",
        num_input_tokens: int = 0,
        trace: Callable[[RequestOutput, dict[str, str | int]], None] | None = None,
    ) -> None:
        self._trace = trace
        self._client_id = client_id
        self._num_input_tokens = num_input_tokens
        self._telemetry = telemetry
        self._emit = emit
        self._arrived_s = arrived_s
        self._first_s: float | None = None
        self._num_tokens = 0

    def __call__(self, output: RequestOutput) -> None:
        """Pass one output on."""
        self._emit(output)
        if output.token_ids:
            self._num_tokens += len(output.token_ids)
            if self._first_s is None:
                self._first_s = time.monotonic()
                self._telemetry.seconds("dspark_time_to_first_token_seconds", self._first_s - self._arrived_s)
        if output.final:
            self._end(output)

    def _end(self, output: RequestOutput) -> None:
        now_s = time.monotonic()
        log_end(
            output,
            client_id=self._client_id,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=self._num_tokens,
            first_token_s=None if self._first_s is None else self._first_s - self._arrived_s,
            total_s=now_s - self._arrived_s,
        )
        if self._trace is not None:
            told: dict[str, str | int] = {
                "dspark.id": self._client_id,
                "dspark.request": output.request_id,
                "dspark.input_tokens": self._num_input_tokens,
                "dspark.output_tokens": self._num_tokens,
                "dspark.end": output.finish_reason or "error",
            }
            self._trace(output, told)
        if output.error is not None:
            self._telemetry.failed(failure_reason(output.error))
        elif output.finish_reason == "cancelled":
            self._telemetry.cancelled()
        elif output.finish_reason == "timeout":
            self._telemetry.failed("timeout")
        else:
            self._telemetry.completed()
            self._telemetry.seconds("dspark_e2e_request_latency_seconds", now_s - self._arrived_s)
        if self._first_s is not None and self._num_tokens > 1:
            mean_s = (now_s - self._first_s) / (self._num_tokens - 1)
            self._telemetry.seconds("dspark_time_per_output_token_seconds", mean_s)


def failure_reason(error: Exception) -> str:
    """Return the label of a failed request: its wire code in lower case."""
    return error.code.lower() if isinstance(error, DSparkError) else "internal"


class MetricsThread:
    """Flushes a telemetry every `interval_s` until it is closed, and once more then.

    Arguments:
        stats: gives the engine's counters; called from this thread.
    """

    def __init__(
        self, telemetry: Telemetry, stats: Callable[[], EngineStats], *, interval_s: float = 0.5
    ) -> None:
        self._telemetry = telemetry
        self._stats = stats
        self._interval_s = interval_s
        self.busy_s = 0.0  # processor time spent since the start
        self.num_flushes = 0  # that have ended
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dspark-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the rest and stop."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._interval_s)
            started_s = time.thread_time()
            try:
                self._telemetry.flush(self._stats())
            except Exception:  # metrics are no reason to stop serving
                _log.exception("the metrics could not be written; they are tried again")
            self.busy_s += time.thread_time() - started_s
            self.num_flushes += 1


_Value = TypeVar("_Value")


def _spread(values: list[_Value], most: int) -> list[_Value]:
    """Return at most `most` of the values, evenly spaced, the last among them."""
    if len(values) <= most:
        return values
    return [values[(index + 1) * len(values) // most - 1] for index in range(most)]
