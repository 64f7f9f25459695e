"""Every metric of the model as one table: name, kind, labels, buckets, meaning.

Knows neither Triton nor where values come from (`telemetry`). The dashboard, the alert rules and the live page
are held to this table by a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Protocol

__all__ = [
    "METRICS",
    "METRICS_BY_NAME",
    "PHASES",
    "MetricKind",
    "MetricSink",
    "MetricSpec",
    "NullSink",
    "exposed_names",
]

MetricKind = Literal["counter", "gauge", "histogram"]

PHASES: Final = ("draft", "schedule", "verify", "commit", "learn")  # of one step, in order
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS: Final = (
    0.00001,
    0.00003,
    0.0001,
    0.0003,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
)
_SAMPLED: Final = "; a sample where there are many a second, the counters beside it are exact"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric family. Every series also carries the labels model and version; `labels` are further ones."""

    name: str
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, of histograms only


class MetricSink(Protocol):
    """Where values go. Each call may cost some 20 us, so callers batch."""

    def increment(self, name: str, amount: float, /, **labels: str) -> None: ...

    def set(self, name: str, value: float, /, **labels: str) -> None: ...

    def observe(self, name: str, value: float, /, **labels: str) -> None: ...


class NullSink:
    """Takes everything and keeps nothing: for a server without custom metrics."""

    def increment(self, name: str, amount: float, /, **labels: str) -> None:
        """Drop it."""

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Drop it."""

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Drop it."""


METRICS: Final[tuple[MetricSpec, ...]] = (
    # Speculation; the first four mean what vLLM's counters of the same names mean.
    MetricSpec(
        "dspark_spec_decode_num_drafts_total", "counter", "blocks of which at least one draft was verified"
    ),
    MetricSpec("dspark_spec_decode_num_draft_tokens_total", "counter", "drafts that the target verified"),
    MetricSpec("dspark_spec_decode_num_accepted_tokens_total", "counter", "drafts that were accepted"),
    MetricSpec(
        "dspark_spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "drafts accepted at each position of a block, the first is 0",
        ("position",),
    ),
    MetricSpec(
        "dspark_spec_verify_tokens_total",
        "counter",
        "rows of the target spent on decoding: anchors and drafts",
    ),
    MetricSpec("dspark_spec_trimmed_tokens_total", "counter", "drafts that were proposed but not verified"),
    MetricSpec(
        "dspark_drafter_faults_total",
        "counter",
        "calls of the drafter that failed; the step went on without its drafts",
    ),
    MetricSpec(
        "dspark_verify_len",
        "histogram",
        "drafts verified per sequence and step" + _SAMPLED,
        buckets=(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0),
    ),
    MetricSpec("dspark_steps_total", "counter", "steps of the engine"),
    MetricSpec(
        "dspark_step_seconds",
        "histogram",
        "seconds of each phase of a step" + _SAMPLED,
        ("phase",),
        _STEP_SECONDS,
    ),
    MetricSpec(
        "dspark_cost_model_error",
        "gauge",
        "median relative error of the cost model's last predictions of a step's time",
    ),
    MetricSpec(
        "dspark_calibration_ece",
        "gauge",
        "expected calibration error of the confidences at each position, the first is 0",
        ("position",),
    ),
    # Reliability: of drafts whose fate was seen, by what had been forecast for them.
    MetricSpec(
        "dspark_reliability_drafts_total",
        "counter",
        "drafts whose acceptance was observed, by bin of forecast confidence (0 = 0-10 %)",
        ("bin",),
    ),
    MetricSpec(
        "dspark_reliability_confidence_total", "counter", "sum of the forecasts of these drafts", ("bin",)
    ),
    MetricSpec("dspark_reliability_accepted_total", "counter", "how many of these were accepted", ("bin",)),
    # Load.
    MetricSpec("dspark_num_requests_running", "gauge", "requests in the running batch"),
    MetricSpec("dspark_num_requests_waiting", "gauge", "requests that wait for room in the batch"),
    MetricSpec("dspark_kv_cache_usage", "gauge", "share of the cache's pages that are held, 0 to 1"),
    MetricSpec(
        "dspark_preemptions_total", "counter", "sequences that lost their pages and were computed anew"
    ),
    # Tokens and requests.
    MetricSpec("dspark_prompt_tokens_total", "counter", "prompt tokens computed"),
    MetricSpec("dspark_cached_prompt_tokens_total", "counter", "prompt tokens found again in the cache"),
    MetricSpec("dspark_generation_tokens_total", "counter", "tokens generated"),
    MetricSpec(
        "dspark_time_to_first_token_seconds",
        "histogram",
        "from a request's arrival to its first token",
        buckets=_SECONDS,
    ),
    MetricSpec(
        "dspark_time_per_output_token_seconds",
        "histogram",
        "mean time between a request's tokens, after the first",
        buckets=_SECONDS,
    ),
    MetricSpec(
        "dspark_e2e_request_latency_seconds",
        "histogram",
        "from a request's arrival to its last token",
        buckets=_LONG_SECONDS,
    ),
    MetricSpec("dspark_requests_completed_total", "counter", "requests that ended with stop or length"),
    MetricSpec("dspark_requests_cancelled_total", "counter", "requests whose client left or asked to stop"),
    MetricSpec(
        "dspark_requests_failed_total",
        "counter",
        "requests that ended otherwise: invalid_arg, unavailable, internal, timeout",
        ("reason",),
    ),
    # Setting `record`.
    MetricSpec("dspark_recorded_answers_total", "counter", "answers kept to retrain the drafter"),
    MetricSpec(
        "dspark_unrecorded_answers_total",
        "counter",
        "answers that were to be kept and were not: too many at once, or a folder that cannot be written",
    ),
)

METRICS_BY_NAME: Final[dict[str, MetricSpec]] = {spec.name: spec for spec in METRICS}


def exposed_names() -> frozenset[str]:
    """Return every name that a scrape of the model can hold; histograms have three."""
    names: set[str] = set()
    for spec in METRICS:
        names.add(spec.name)
        if spec.kind == "histogram":
            names.update(spec.name + ending for ending in ("_bucket", "_sum", "_count"))
    return frozenset(names)
