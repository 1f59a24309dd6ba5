"""Spans of live calls: what they hold, whose children they are, and that they reach a collector."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from kvarts.v1 import model_pb2, slot_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from service.telemetry import RpcRecord
from service.tracing import OtelSpans
from tests.contract.serving import GenerateRequest, SamplingParams, Serving, failure, serving

TRACE, SPAN = "a1" * 16, "b2" * 8
PARENT = (("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "vendor=1"))
CANARY = "canary-zqx"


class Noted(OtelSpans):
    """Spans, and the calls that have been recorded: the server does so after its answer."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._calls: asyncio.Queue[RpcRecord] = asyncio.Queue()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        super().__init__(provider)

    def record(self, call: RpcRecord) -> None:
        super().record(call)
        self._calls.put_nowait(call)

    async def only(self, num_calls: int = 1) -> ReadableSpan:
        """The one span of so many calls."""
        async with asyncio.timeout(30):
            for _ in range(num_calls):
                await self._calls.get()
        (span,) = self._exporter.get_finished_spans()
        return span


@asynccontextmanager
async def traced(**changes: Any) -> AsyncGenerator[tuple[Serving, Noted]]:
    spans = Noted()
    async with serving(spans=spans, **changes) as it:
        yield it, spans


async def test_a_generation_has_one_span_by_the_conventions_under_its_client() -> None:
    request = GenerateRequest(
        text=CANARY,
        max_tokens=3,
        ignore_eos=True,
        sampling=SamplingParams(temperature=0.5, top_k=7, seed=3),
    )
    async with traced() as (it, spans):
        responses = await it.collect(request, metadata=PARENT)
        span = await spans.only()
    finished = responses[-1].finished
    assert (span.name, span.kind) == ("text_completion fake", SpanKind.SERVER)
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.context.trace_state.get("vendor") == "1"
    attributes = dict(span.attributes or {})
    for name in ("kvarts.queue_s", "kvarts.ttft_s"):
        assert attributes.pop(name) is not None
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.service": "kvarts.v1.GenerationService",
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvarts",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": "fake",
        "gen_ai.response.id": responses[0].started.request_id,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": finished.prompt_tokens,
        "gen_ai.usage.output_tokens": 3,
        "kvarts.cached_tokens": 0,
        "kvarts.request_id": responses[0].started.request_id,
        "kvarts.slot_id": responses[0].started.slot_id,
    }
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times, key=lambda at: at or 0)
    assert CANARY not in span.to_json()
    answer = "".join(response.chunk.text for response in responses)
    assert answer not in span.to_json()


async def test_a_refused_call_names_its_cause() -> None:
    async with traced() as (it, spans):
        failed = await failure(it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=99)))
        span = await spans.only()
    assert failed.reason == "NO_SUCH_SLOT"
    assert span.name == "kvarts.v1.SlotService/EraseSlot"
    assert span.status.status_code is StatusCode.ERROR
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "NO_SUCH_SLOT"
    assert attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert not any(key.startswith("gen_ai") for key in attributes)


async def test_probes_have_no_spans_and_a_bad_parent_is_none() -> None:
    async with traced() as (it, spans):
        await it.status()
        await it.model.GetModel(
            model_pb2.GetModelRequest(), metadata=(("traceparent", "00-nonsense"),)
        )
        span = await spans.only(num_calls=2)
    assert span.name == "kvarts.v1.ModelService/GetModel"
    assert span.parent is None


async def test_a_log_line_has_the_trace_of_its_span(caplog: pytest.LogCaptureFixture) -> None:
    async with traced() as (it, spans):
        with caplog.at_level("INFO", "kvarts.requests"):
            await it.model.GetModel(model_pb2.GetModelRequest())
            span = await spans.only()
    fields = [record.__dict__["fields"] for record in caplog.records if "fields" in record.__dict__]
    assert span.context is not None
    assert [line["trace_id"] for line in fields] == [f"{span.context.trace_id:032x}"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OpenTelemetry collector that keeps the names of the spans that it is sent."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.services: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            attributes = resource.resource.attributes
            self.services |= {a.value.string_value for a in attributes if a.key == "service.name"}
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_arrive_in_a_collector_before_the_server_has_ended() -> None:
    collector, door = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, door)
    port = door.add_insecure_port("127.0.0.1:0")
    await door.start()
    async with serving(otlp_endpoint=f"http://127.0.0.1:{port}") as it:
        await it.collect(GenerateRequest(text="abc", max_tokens=2))
        await it.model.GetModel(model_pb2.GetModelRequest())
    await door.stop(1)
    assert set(collector.names) == {"text_completion fake", "kvarts.v1.ModelService/GetModel"}
    assert collector.services == {"kvarts"}


async def test_a_collector_that_is_gone_holds_up_neither_calls_nor_the_end() -> None:
    async with serving(otlp_endpoint="http://127.0.0.1:9", stop_s=0.5) as it:
        await it.collect(GenerateRequest(text="abc", max_tokens=2))
        stopping_s = time.monotonic()
    # Far less than the exporter's own patience, which nothing interrupts.
    assert time.monotonic() - stopping_s < 10
