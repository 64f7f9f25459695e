"""A stand-in for Triton's Python backend module: what the model touches, and nothing else."""

from __future__ import annotations

import json
from typing import ClassVar

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):  # noqa: N818 (the backend's name)
    pass


class TritonError(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = range(4)

    def __init__(self, message, code=INTERNAL):
        super().__init__(message)
        self.code = code


class Tensor:
    def __init__(self, name, array):
        self.name, self.as_numpy = (lambda: name), (lambda: array)


class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Logger:
    log_info = log_warn = log_error = staticmethod(lambda _message: None)


class Request:
    """A request that is its own response sender; `sent` holds (response, final) of everything it got."""

    def __init__(self, tensors, parameters=None, *, outputs=(), request_id="", timeout_us=0):
        self.sent, self.gone = [], False
        self.inputs = lambda: [Tensor(name, array) for name, array in tensors.items()]
        self.parameters = lambda: json.dumps(parameters or {})
        self.requested_output_names = lambda: list(outputs)
        self.request_id, self.timeout = (lambda: request_id), (lambda: timeout_us)

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return self.gone

    def send(self, response=None, flags=0):
        assert not any(final for _, final in self.sent), "sent after the final flag"
        self.sent.append((response, bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)))


class MetricFamily:
    """Keeps every series in `values`: name and labels -> number, or the list of observed values."""

    COUNTER, GAUGE, HISTOGRAM = range(3)
    values: ClassVar[dict] = {}

    def __init__(self, name, description, kind):
        self.name, self.kind, self.about = name, kind, description

    def Metric(self, labels, buckets=None):  # noqa: N802 (the backend's name)
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        return Metric(self, (self.name, *sorted(labels.items())))


class Metric:
    def __init__(self, family, key):
        self.family, self.key = family, key
        family.values[key] = [] if family.kind == family.HISTOGRAM else 0.0

    def increment(self, amount):
        assert amount >= 0 and self.family.kind == self.family.COUNTER
        self.family.values[self.key] += amount

    def set(self, value):
        assert self.family.kind == self.family.GAUGE
        self.family.values[self.key] = value

    def observe(self, value):
        self.family.values[self.key].append(value)
