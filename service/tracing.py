"""OpenTelemetry spans of calls, by the conventions for generative AI (the extra `otel`).

A call's span is made when the call has ended, from what its record holds: nothing is added to the
path of a token, and no span can hold what the record does not, so neither prompt nor answer.

Example:
    >>> spans = otlp_spans("http://127.0.0.1:4317")

Source: OpenTelemetry semantic conventions, "gen-ai-spans" and "rpc/grpc" (both in development).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from service.metrics import server_version
from service.telemetry import RpcRecord

_OWN_PACKAGE = "/kvarts.v1."
_PROVIDER = "kvarts"
_CLOSE_S = 1.0


class OtelSpans:
    """Turns ended calls into spans of one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvarts.service", server_version())
        self._propagator = TraceContextTextMapPropagator()

    def record(self, call: RpcRecord) -> None:
        """Makes the span of a call; probes and reflection have none."""
        trace = call.trace
        if not trace.method.startswith(_OWN_PACKAGE):
            return
        span = self._tracer.start_span(
            _name(call),
            context=self._propagator.extract(trace.parent),
            kind=SpanKind.SERVER,
            attributes=_attributes(call),
            start_time=trace.start_ns,
        )
        for stage, at_s in trace.marks_s.items():
            span.add_event(stage, timestamp=trace.start_ns + round(at_s * 1e9))
        if call.code != "OK":
            span.set_status(Status(StatusCode.ERROR))
        call.trace_id = format_trace_id(span.get_span_context().trace_id)
        span.end(trace.start_ns + round((call.duration_s or 0.0) * 1e9))

    def close(self) -> None:
        """Sends what is left, waiting for the collector for at most a second."""
        # Its own shutdown waits for ten times as long, and nothing can interrupt it.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


def otlp_spans(endpoint: str) -> OtelSpans:
    """Spans for a collector at `endpoint`, `http://HOST:PORT` or `https://...`, over OTLP/gRPC."""
    resource = Resource.create({"service.name": "kvarts", "service.version": server_version()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return OtelSpans(provider)


def _name(call: RpcRecord) -> str:
    trace = call.trace
    if trace.operation is None:
        return trace.method.strip("/")
    return f"{trace.operation} {trace.model}" if trace.model else trace.operation


def _attributes(call: RpcRecord) -> Mapping[str, AttributeValue]:
    service, _, method = call.trace.method.strip("/").partition("/")
    assert call.code is not None
    found: dict[str, AttributeValue | None] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": grpc.StatusCode[call.code].value[0],
        "error.type": None if call.code == "OK" else call.reason or call.code,
        "kvarts.request_id": call.request_id,
    }
    if call.trace.operation is not None:
        found |= _gen_ai(call)
    return {key: value for key, value in found.items() if value is not None}


def _gen_ai(call: RpcRecord) -> Mapping[str, AttributeValue | None]:
    trace = call.trace
    settings = {f"gen_ai.request.{name}": value for name, value in trace.settings.items()}
    return settings | {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.response.id": call.request_id,
        "gen_ai.response.finish_reasons": tuple(trace.finish_reasons) or None,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": call.output_tokens,
        "kvarts.cached_tokens": call.cached_tokens,
        "kvarts.slot_id": call.slot_id,
        "kvarts.queue_s": call.queue_s,
        "kvarts.ttft_s": call.ttft_s,
    }
