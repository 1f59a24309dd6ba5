"""The trace of an HTTP request: a client's headers go on to the service, with or without spans.

Knows no OpenTelemetry: `gateway.otel` is what makes spans, where it is installed and asked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, cast

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.service import Metadata

# Where a request's trace lies in the scope.
TRACE = "kvarts.trace"
# W3C Trace Context, section 3.2: version-trace id-parent id-flags; version ff and zeros are invalid.
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
# Section 3.3.1.5: vendors may drop what is longer.
_STATE = re.compile(r"[ -~]{1,512}")


class RequestSpan(Protocol):
    """One request."""

    @property
    def metadata(self) -> Metadata:
        """What its calls of the service carry."""
        ...

    def end(self, route: str, status: int) -> None:
        """The request has ended."""
        ...


class Spans(Protocol):
    """Makes the spans of requests."""

    def begin(self, method: str, headers: Headers) -> RequestSpan:
        """Begins the span of a request that has come."""
        ...

    def close(self) -> None:
        """Sends what has not been sent; may wait for the collector for a second."""
        ...


@dataclass(frozen=True)
class _Passed:
    metadata: Metadata

    def end(self, route: str, status: int) -> None:
        """Nothing was begun."""


class _PassedOn:
    """Makes no spans: the service's continue the client's."""

    def begin(self, method: str, headers: Headers) -> RequestSpan:
        return _Passed(tuple(parent_of(headers).items()))

    def close(self) -> None:
        """Nothing is kept."""


PASSED_ON: Spans = _PassedOn()


def parent_of(headers: Headers) -> dict[str, str]:
    """The headers of a valid trace that a client began; an invalid one is as good as none."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _PARENT.fullmatch(parent):
        return {}
    found = {"traceparent": parent}
    return found | {"tracestate": state} if _STATE.fullmatch(state) else found


def trace_of(scope: Scope) -> Metadata:
    """What the calls of a request carry besides its credentials."""
    return cast("Metadata", scope.get(TRACE, ()))
