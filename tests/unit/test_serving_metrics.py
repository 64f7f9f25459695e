"""What the metrics tell: every event once, exactly, however flushes fall; histograms sampled, counters not."""

import time
from dataclasses import replace

import numpy as np
import pytest
from dspark.engine.stats import EngineStats
from dspark.engine.step_report import StepReport
from dspark.errors import CapacityError, RequestError
from dspark.request import RequestOutput
from dspark.scheduling.interface import StepObservation
from dspark.serving.metric_sink import TritonMetricSink
from dspark.serving.metrics import METRICS, METRICS_BY_NAME, PHASES, exposed_names
from dspark.serving.telemetry import MetricsThread, RequestMeter, Telemetry
from support import fake_pb_utils

CONTRACT = {
    "dspark_spec_decode_num_drafts_total": "counter",
    "dspark_spec_decode_num_draft_tokens_total": "counter",
    "dspark_spec_decode_num_accepted_tokens_total": "counter",
    "dspark_spec_decode_num_accepted_tokens_per_pos_total": "counter",
    "dspark_spec_verify_tokens_total": "counter",
    "dspark_spec_trimmed_tokens_total": "counter",
    "dspark_verify_len": "histogram",
    "dspark_step_seconds": "histogram",
    "dspark_cost_model_error": "gauge",
    "dspark_calibration_ece": "gauge",
    "dspark_num_requests_running": "gauge",
    "dspark_num_requests_waiting": "gauge",
    "dspark_kv_cache_usage": "gauge",
    "dspark_prompt_tokens_total": "counter",
    "dspark_generation_tokens_total": "counter",
    "dspark_time_to_first_token_seconds": "histogram",
    "dspark_time_per_output_token_seconds": "histogram",
    "dspark_e2e_request_latency_seconds": "histogram",
    "dspark_requests_cancelled_total": "counter",
    "dspark_requests_failed_total": "counter",
}


class Sink:
    """Adds up counters, keeps gauges and observed values; series are (name, label values...)."""

    def __init__(self):
        self.values, self.calls = {}, 0

    def _key(self, name, labels):
        assert set(labels) == set(METRICS_BY_NAME[name].labels)
        self.calls += 1
        return (name, *labels.values()) if labels else name

    def increment(self, name, amount, /, **labels):
        assert METRICS_BY_NAME[name].kind == "counter" and amount > 0
        key = self._key(name, labels)
        self.values[key] = self.values.get(key, 0) + amount

    def set(self, name, value, /, **labels):
        assert METRICS_BY_NAME[name].kind == "gauge"
        self.values[self._key(name, labels)] = value

    def observe(self, name, value, /, **labels):
        assert METRICS_BY_NAME[name].kind == "histogram"
        self.values.setdefault(self._key(name, labels), []).append(value)


def report(verify_len, accepted, *, logits=None, **seconds):
    given = dict.fromkeys((f"{phase}_s" for phase in PHASES), 0.001) | seconds
    num = len(verify_len)
    observation = StepObservation(
        sequence_ids=np.arange(num),
        num_drafts=np.full(num, 4, np.int32),
        verify_len=np.array(verify_len, np.int32),
        accepted=np.array(accepted, np.int32),
        sampled=np.zeros(num, np.bool_),
        altered=np.zeros(num, np.bool_),
        target_tokens=num,
        verify_s=0.001,
        confidence_logits=logits,
    )
    return StepReport(observation=observation, **given)


PROMPTS_ONLY = StepReport(observation=None, **dict.fromkeys((f"{phase}_s" for phase in PHASES), 0.5))


def test_every_metric_of_the_contract_is_there_with_its_kind():
    assert CONTRACT.items() <= {spec.name: spec.kind for spec in METRICS}.items()
    assert METRICS_BY_NAME["dspark_requests_failed_total"].labels == ("reason",)
    assert METRICS_BY_NAME["dspark_step_seconds"].labels == ("phase",)
    assert len(METRICS_BY_NAME) == len(METRICS)


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_names_follow_prometheus(spec):
    assert spec.name.endswith("_total") == (spec.kind == "counter")
    assert (len(spec.buckets) > 0) == (spec.kind == "histogram")
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_exposed_names_hold_the_three_of_a_histogram():
    assert {"dspark_verify_len_bucket", "dspark_verify_len_sum", "dspark_verify_len_count"} <= exposed_names()


@pytest.mark.parametrize("flush_every", [1, 3, 100])
def test_counters_are_exact_however_flushes_fall(flush_every):
    rng = np.random.default_rng(0)
    sink = Sink()
    telemetry, stats = Telemetry(sink), EngineStats(pages_total=8)
    per_position, rows = np.zeros(4), 0
    for index in range(100):
        verify_len = rng.integers(0, 5, 7)
        accepted = rng.integers(0, verify_len + 1)
        telemetry.step(report(verify_len, accepted))
        rows += 7 + verify_len.sum()
        per_position += [(accepted > position).sum() for position in range(4)]
        stats.num_steps += 1
        stats.num_proposed_tokens += 28
        stats.num_draft_tokens += int(verify_len.sum())
        stats.num_accepted_tokens += int(accepted.sum())
        if index % flush_every == 0:
            telemetry.flush(stats)
    telemetry.flush(stats)
    telemetry.flush(stats)  # nothing new: nothing counted
    name = "dspark_spec_decode_num_accepted_tokens_per_pos_total"
    assert [sink.values[name, str(position)] for position in range(4)] == per_position.tolist()
    assert sink.values["dspark_spec_verify_tokens_total"] == rows
    assert sink.values["dspark_steps_total"] == 100
    assert sink.values["dspark_spec_decode_num_accepted_tokens_total"] == per_position.sum()
    assert sink.values["dspark_spec_trimmed_tokens_total"] == 2800 - stats.num_draft_tokens


def test_a_flush_costs_a_bounded_number_of_calls_whatever_came():
    sink = Sink()
    telemetry = Telemetry(sink)
    for _ in range(1000):
        telemetry.step(report([4] * 64, [2] * 64, logits=np.zeros((64, 4), np.float32)))
        for name in ("dspark_time_to_first_token_seconds", "dspark_e2e_request_latency_seconds"):
            telemetry.seconds(name, 0.1)
        telemetry.completed()
    telemetry.flush(EngineStats(num_steps=1000))
    assert sink.calls < 150
    assert set(sink.values["dspark_verify_len"]) == {4.0}


def test_sampled_values_are_spread_over_all_that_came():
    sink = Sink()
    telemetry = Telemetry(sink)
    for index in range(100):
        telemetry.step(report([0], [0], verify_s=float(index)))
    telemetry.flush(EngineStats())
    values = sink.values["dspark_step_seconds", "verify"]
    assert values == [49.0, 99.0]


def test_steps_that_only_prefill_count_their_time_and_no_drafts():
    sink = Sink()
    telemetry = Telemetry(sink)
    telemetry.step(PROMPTS_ONLY)
    telemetry.flush(EngineStats(num_steps=1))
    assert sink.values["dspark_step_seconds", "verify"] == [0.5]
    assert "dspark_spec_verify_tokens_total" not in sink.values and "dspark_verify_len" not in sink.values


def test_gauges_are_written_when_they_change():
    sink = Sink()
    telemetry = Telemetry(sink)
    telemetry.flush(EngineStats(num_running=2, num_waiting=1, pages_held=3, pages_total=4))
    assert sink.values == {
        "dspark_num_requests_running": 2, "dspark_num_requests_waiting": 1, "dspark_kv_cache_usage": 0.75,
    }  # fmt: skip
    calls = sink.calls
    telemetry.flush(EngineStats(num_running=2, num_waiting=1, pages_held=3, pages_total=4))
    assert sink.calls == calls
    telemetry.flush(EngineStats(num_running=0, num_waiting=1, pages_held=3, pages_total=4))
    assert sink.values["dspark_num_requests_running"] == 0 and sink.calls == calls + 1


def test_what_the_scheduler_learned_is_shown():
    class Learner:
        class cost_model:  # noqa: N801
            error = 0.25

        class calibrator:  # noqa: N801
            @staticmethod
            def ece():
                return np.array([0.01, np.nan, 0.03])

            @staticmethod
            def confidence(logits, *, sampled):
                assert sampled.shape == (1,)
                return np.full(logits.shape, 0.75)

    sink = Sink()
    telemetry = Telemetry(sink, Learner())
    telemetry.step(report([4], [2], logits=np.zeros((1, 4), np.float32)))
    telemetry.flush(EngineStats())
    assert sink.values["dspark_cost_model_error"] == 0.25
    assert sink.values["dspark_calibration_ece", "0"] == 0.01
    assert ("dspark_calibration_ece", "1") not in sink.values
    # Two accepted, the third rejected, the fourth never looked at.
    assert sink.values["dspark_reliability_drafts_total", "7"] == 3
    assert sink.values["dspark_reliability_accepted_total", "7"] == 2
    assert sink.values["dspark_reliability_confidence_total", "7"] == pytest.approx(2.25)


def test_reliability_leaves_out_what_no_forecast_was_made_for():
    """Drafts of requests that alter their logits, and nodes of trees: of those, accepted ones are no prefix."""
    sink = Sink()
    telemetry = Telemetry(sink)
    step = report([4, 4], [2, 3], logits=np.zeros((2, 4), np.float32))
    step = replace(step, observation=replace(step.observation, altered=np.array([True, False])))
    telemetry.step(step)
    telemetry.flush(EngineStats())
    assert sink.values["dspark_reliability_drafts_total", "5"] == 4
    assert sink.values["dspark_reliability_accepted_total", "5"] == 3


@pytest.mark.parametrize(
    ("last", "name", "labels"),
    [
        ({"finish_reason": "stop"}, "dspark_requests_completed_total", ()),
        ({"finish_reason": "length"}, "dspark_requests_completed_total", ()),
        ({"finish_reason": "cancelled"}, "dspark_requests_cancelled_total", ()),
        ({"finish_reason": "timeout"}, "dspark_requests_failed_total", ("timeout",)),
        ({"error": RequestError("x", 1, "2")}, "dspark_requests_failed_total", ("invalid_arg",)),
        ({"error": CapacityError("full")}, "dspark_requests_failed_total", ("unavailable",)),
        ({"error": ZeroDivisionError()}, "dspark_requests_failed_total", ("internal",)),
    ],
)
def test_every_end_of_a_request_is_counted_once_under_its_name(last, name, labels):
    sink, passed = Sink(), []
    telemetry = Telemetry(sink)
    meter = RequestMeter(telemetry, passed.append, arrived_s=time.monotonic() - 1.0)
    outputs = [
        RequestOutput(request_id=1, token_ids=(1, 2), text="a"),
        RequestOutput(request_id=1, token_ids=(3,), text="b", **last),
    ]
    for output in outputs:
        meter(output)
    telemetry.flush(EngineStats())
    assert passed == outputs
    ended = {key: value for key, value in sink.values.items() if "dspark_requests" in str(key)}
    assert ended == {((name, *labels) if labels else name): 1}
    assert sink.values["dspark_time_to_first_token_seconds"][0] >= 1.0
    assert 0 <= sink.values["dspark_time_per_output_token_seconds"][0] < 1.0
    assert ("dspark_e2e_request_latency_seconds" in sink.values) == (
        name == "dspark_requests_completed_total"
    )


def test_a_sink_that_fails_does_not_end_the_metrics():
    class Broken(Sink):
        def set(self, name, value, /, **labels):
            if self.calls == 0:
                self.calls = 1
                raise RuntimeError("shared memory is full")
            super().set(name, value, **labels)

    sink = Broken()
    thread = MetricsThread(Telemetry(sink), lambda: EngineStats(num_steps=3, num_running=1), interval_s=0.001)
    end = time.monotonic() + 60
    while "dspark_num_requests_running" not in sink.values and time.monotonic() < end:
        time.sleep(0.001)
    thread.close()
    assert sink.values["dspark_steps_total"] == 3 and sink.values["dspark_num_requests_running"] == 1


def test_the_last_numbers_are_written_when_the_thread_closes():
    sink, steps = Sink(), [0]
    thread = MetricsThread(Telemetry(sink), lambda: EngineStats(num_steps=steps[0]), interval_s=60)
    steps[0] = 7
    thread.close()
    assert sink.values["dspark_steps_total"] == 7


def test_series_without_labels_show_before_anything_happens():
    fake_pb_utils.MetricFamily.values.clear()
    sink = TritonMetricSink(fake_pb_utils, {"model": "m", "version": "1"})
    labels = (("model", "m"), ("version", "1"))
    assert fake_pb_utils.MetricFamily.values["dspark_steps_total", *labels] == 0.0
    sink.increment("dspark_requests_failed_total", 2, reason="timeout")
    key = ("dspark_requests_failed_total", *sorted((*labels, ("reason", "timeout"))))
    assert fake_pb_utils.MetricFamily.values[key] == 2
    sink.observe("dspark_verify_len", 3)
    sink.set("dspark_kv_cache_usage", 0.5)
    assert fake_pb_utils.MetricFamily.values["dspark_verify_len", *labels] == [3]
    sink.close()
