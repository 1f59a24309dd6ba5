"""Traces over HTTP: a client's goes on to the service, with and without spans of the gateway."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.datastructures import Headers

from gateway.otel import OtelSpans
from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService

TRACE, SPAN = "a1" * 16, "b2" * 8
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
BODY = {"prompt": "canary", "n_predict": 1}


async def test_a_clients_trace_goes_on_to_the_service(serve: Serve, service: FakeService):
    async with serve() as client:
        await client.post("/completion", json=BODY, headers=PARENT)
        await client.post("/completion", json=BODY)
    assert service.traces == [PARENT, {}]


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": "nonsense"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01"},
        {"tracestate": "vendor=1"},
        {"traceparent": "0" * 5000},
    ],
)
async def test_an_invalid_trace_is_as_good_as_none(
    serve: Serve, service: FakeService, headers: dict[str, str]
):
    async with serve() as client:
        assert (await client.post("/completion", json=BODY, headers=headers)).status_code == 200
    assert service.traces == [{}]


async def test_a_request_has_a_span_that_is_the_parent_of_the_services(
    serve: Serve, service: FakeService
):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serve(spans=OtelSpans(provider)) as client:
        exporter.clear()
        await client.post("/completion", json=BODY, headers=PARENT)
        await client.request("PROPFIND", "/canary", headers=PARENT)
        await client.post("/completion", json=[], headers=PARENT)
    good, unknown, bad = [span for span in exporter.get_finished_spans() if span.parent]
    assert good.context is not None
    assert good.parent is not None
    assert (good.name, f"{good.context.trace_id:032x}") == ("POST /completion", TRACE)
    assert f"{good.parent.span_id:016x}" == SPAN
    assert dict(good.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/completion",
        "http.response.status_code": 200,
    }
    sent = service.traces[0]["traceparent"]
    assert sent == f"00-{TRACE}-{good.context.span_id:016x}-01"
    assert service.traces[0]["tracestate"] == "vendor=1"
    # Neither a path nor a method of a client's making becomes a name.
    assert unknown.name == "_OTHER other"
    assert bad.status.status_code is StatusCode.UNSET
    assert all("canary" not in span.to_json() for span in (good, unknown, bad))


def test_a_fault_is_an_error_of_its_span():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    OtelSpans(provider).begin("GET", Headers({})).end("/props", 500)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "500"
