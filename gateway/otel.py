"""OpenTelemetry spans of HTTP requests (the extra `otel`); those of the service are their children.

Source: OpenTelemetry semantic conventions, "http-spans".
"""

from __future__ import annotations

import threading

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from gateway.service import Metadata
from gateway.tracing import RequestSpan, parent_of

_CLOSE_S = 1.0
_FIRST_FAULT = 500
# What a client invents is named as the conventions say.
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class OtelSpans:
    """Makes spans of one provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvarts.gateway")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, headers: Headers) -> RequestSpan:
        """Begins a span under the client's, if it sent one."""
        method = method if method in _METHODS else "_OTHER"
        parent = self._propagator.extract(parent_of(headers))
        span = self._tracer.start_span(method, context=parent, kind=SpanKind.SERVER)
        carried: dict[str, str] = {}
        self._propagator.inject(carried, set_span_in_context(span))
        return _OtelSpan(span, method, tuple(carried.items()))

    def close(self) -> None:
        """Sends what is left, waiting for the collector for at most a second."""
        # Its own shutdown waits for ten times as long, and nothing can interrupt it.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)


class _OtelSpan:
    def __init__(self, span: Span, method: str, metadata: Metadata) -> None:
        self._span = span
        self._method = method
        self.metadata = metadata

    def end(self, route: str, status: int) -> None:
        """Names the span by its route: a path may hold what a client wrote."""
        span = self._span
        span.update_name(f"{self._method} {route}")
        span.set_attributes(
            {
                "http.request.method": self._method,
                "http.route": route,
                "http.response.status_code": status,
            }
        )
        if status >= _FIRST_FAULT:
            span.set_attribute("error.type", str(status))
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def otlp_spans(endpoint: str) -> OtelSpans:
    """Spans for a collector at `endpoint`, `http://HOST:PORT` or `https://...`, over OTLP/gRPC."""
    resource = Resource.create({"service.name": "kvarts-gateway"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return OtelSpans(provider)
