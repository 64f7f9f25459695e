"""Trace headers of clients: those that gRPC cannot carry fail no request."""

import pytest
from dspark.gateway.app import trace_headers

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("bad", ["vendor=\u00e9", "a=\tb", "a=" + "x" * 30_000])
def test_headers_that_cannot_be_carried_are_left_out(bad):
    assert trace_headers({"traceparent": TRACE, "tracestate": bad, "x": "y"}) == {"traceparent": TRACE}
    assert trace_headers({"tracestate": "a=b"}) == {"tracestate": "a=b"}
