"""What HTTP clients were answered: counts by route and status, and a span of each request.

A route is counted by its pattern, as the table names it, so that no client can make a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.tracing import TRACE, Spans

# Where an endpoint leaves the pattern of its path in the scope.
ROUTE = "kvarts.route"
# Nothing of ours answered: an unknown path, or a gate that stayed shut.
_NO_ROUTE = "other"
# The client went away before a status was sent, in nginx's numbering.
_CLIENT_GONE = 499


class Replies:
    """How often each route answered with each status."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, int]]()

    def add(self, route: str, status: int) -> None:
        """Counts one request that has ended."""
        self._counts[route, status] += 1

    def counts(self) -> Sequence[tuple[tuple[str, int], int]]:
        """Returns ((route, status), count), sorted."""
        return sorted(self._counts.items())


class WatchedReplies:
    """The outermost application: counts and traces each request when it has ended."""

    def __init__(self, app: ASGIApp, replies: Replies, spans: Spans) -> None:
        self._app = app
        self._replies = replies
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands the request on and takes note of the status that was sent."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _CLIENT_GONE
        span = self._spans.begin(scope["method"], Headers(scope=scope))
        scope[TRACE] = span.metadata

        async def noting(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]

        try:
            await self._app(scope, receive, noting)
        finally:
            route = scope.get(ROUTE, _NO_ROUTE)
            self._replies.add(route, status)
            span.end(route, status)
