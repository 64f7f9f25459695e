"""Writes metrics to Triton's `/metrics` through the Python backend's metric families.

The backend's module is handed in: one file of the package imports it.
"""

from __future__ import annotations

from typing import Any

from dspark.serving.metrics import METRICS_BY_NAME, MetricSpec

__all__ = ["TritonMetricSink"]


class TritonMetricSink:
    """Series are made when they are first written; those without further labels at once, so that they show as 0.

    Arguments:
        backend: the module triton_python_backend_utils.
        labels: of every series (model and version).
    """

    def __init__(self, backend: Any, labels: dict[str, str]) -> None:
        self._backend = backend
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, ...], Any] = {}
        for spec in METRICS_BY_NAME.values():
            kind = getattr(backend.MetricFamily, spec.kind.upper())
            self._families[spec.name] = backend.MetricFamily(
                name=spec.name, description=spec.about, kind=kind
            )
            if not spec.labels:
                self._of(spec, {})

    def increment(self, name: str, amount: float, /, **labels: str) -> None:
        self._of(METRICS_BY_NAME[name], labels).increment(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        self._of(METRICS_BY_NAME[name], labels).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        self._of(METRICS_BY_NAME[name], labels).observe(value)

    def close(self) -> None:
        """Take every series down; the backend wants them gone before their families."""
        self._series.clear()
        self._families.clear()

    def _of(self, spec: MetricSpec, labels: dict[str, str]) -> Any:
        key = (spec.name, *(labels[name] for name in spec.labels))
        series = self._series.get(key)
        if series is None:
            given = {"labels": {**self._labels, **labels}}
            if spec.kind == "histogram":
                given["buckets"] = list(spec.buckets)  # type: ignore[assignment]
            series = self._series[key] = self._families[spec.name].Metric(**given)
        return series
