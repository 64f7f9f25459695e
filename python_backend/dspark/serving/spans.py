"""Spans of requests for OpenTelemetry, as children of the spans that Triton itself makes.

Triton (`--trace-config mode=opentelemetry`) tells the whole request and every response it sends; what happened inside,
waiting, prefill, decoding and the drafts, only this process knows. Spans leave as OTLP over HTTP in JSON, from a thread
of their own; when nobody takes them they are dropped, and serving goes on. Standard library only.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from dspark.request import RequestOutput, SpecMetrics

__all__ = ["ENDPOINT_VARIABLE", "SpanExporter", "request_spans"]

ENDPOINT_VARIABLE: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"  # OpenTelemetry's own name
_MOST_PENDING: Final = 4096
_TRACE_PARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_INTERNAL, _ERROR = 1, 2  # OTLP's span kind and status code

_log = logging.getLogger("dspark.serving")


def request_spans(
    context: str, output: RequestOutput, *, end_ns: int, attributes: Mapping[str, str | int]
) -> list[dict[str, Any]]:
    """Return the spans of a request that has ended, in OTLP's JSON form; none when it was not sampled.

    Arguments:
        context: what Triton tells of its own span, a JSON object with `traceparent`.
        output: the request's last; its metrics hold the times.
        end_ns: on time.time_ns()'s clock.
        attributes: of the outer span.
    """
    match = _TRACE_PARENT.search(context)
    if match is None:
        return []
    trace_id, parent = match[1], match[2]
    metrics = output.metrics or SpecMetrics(arrival_time_ns=end_ns)
    own = secrets.token_hex(8)
    outer = _span(
        "dspark.request", trace_id, own, parent, metrics.arrival_time_ns or end_ns, end_ns, attributes
    )
    if output.error is not None:
        outer["status"] = {"code": _ERROR, "message": str(output.error)[:500]}
    spans = [outer]
    drafts = {
        "dspark.decoding_steps": metrics.num_spec_steps,
        "dspark.drafts_verified": metrics.num_draft_tokens,
        "dspark.drafts_accepted": metrics.num_accepted_draft_tokens,
    }
    phases: tuple[tuple[str, int, int, Mapping[str, str | int]], ...] = (
        ("dspark.wait", metrics.arrival_time_ns, metrics.first_scheduled_time_ns, {}),
        ("dspark.prefill", metrics.first_scheduled_time_ns, metrics.first_token_time_ns, {}),
        ("dspark.decode", metrics.first_token_time_ns, metrics.last_token_time_ns, drafts),
    )
    for name, start_ns, stop_ns, told in phases:
        if start_ns and stop_ns:
            spans.append(_span(name, trace_id, secrets.token_hex(8), own, start_ns, stop_ns, told))
    return spans


def _span(
    name: str,
    trace_id: str,
    span_id: str,
    parent: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, str | int],
) -> dict[str, Any]:
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(end_ns),
        "attributes": [_attribute(key, value) for key, value in attributes.items()],
    }


def _attribute(key: str, value: str | int) -> dict[str, Any]:
    return {
        "key": key,
        "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)},
    }


class SpanExporter:
    """See the module's text.

    Arguments:
        url: of the collector, such as http://127.0.0.1:4318/v1/traces.
        interval_s: spans leave so often.
    """

    def __init__(self, url: str, *, interval_s: float = 1.0) -> None:
        self._url = url
        self._interval_s = interval_s
        self._pending: deque[dict[str, Any]] = deque(maxlen=_MOST_PENDING)
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="dspark-spans", daemon=True)
        self._thread.start()

    @classmethod
    def of_environment(cls) -> SpanExporter | None:
        """Return an exporter to where OpenTelemetry's variable says; None without it."""
        url = os.environ.get(ENDPOINT_VARIABLE)
        return cls(url) if url else None

    def ended(self, context: str, output: RequestOutput, attributes: Mapping[str, str | int]) -> None:
        """Take a request that has ended; from any thread, returns at once."""
        self._pending.extend(request_spans(context, output, end_ns=time.time_ns(), attributes=attributes))

    def close(self) -> None:
        """Send the rest and stop."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._interval_s)
            spans = [self._pending.popleft() for _ in range(len(self._pending))]
            if spans:
                self._send(spans)

    def _send(self, spans: list[dict[str, Any]]) -> None:
        content = {
            "resourceSpans": [
                {
                    "resource": {"attributes": [_attribute("service.name", "dspark")]},
                    "scopeSpans": [{"scope": {"name": "dspark"}, "spans": spans}],
                }
            ]
        }
        request = urllib.request.Request(
            self._url, data=json.dumps(content).encode(), headers={"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=2.0):
                self._failing = False
        except (OSError, urllib.error.URLError, ValueError) as error:
            if not self._failing:  # say it once, not every second
                _log.warning("spans cannot be sent to %s and are dropped: %s", self._url, error)
            self._failing = True
