"""What every request passes before its route, in the peer's order.

CORS header, OPTIONS, readiness, API key. Plain ASGI, so that streams go through untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.connection import json_response
from gateway.keys import Keys
from gateway.options import GatewayOptions

# Compared with the whole path: with an API prefix even health needs the key, as with the peer.
PUBLIC = frozenset({"/health", "/v1/health"})
_BEARER = "Bearer "
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

RawHeaders = Sequence[tuple[bytes, bytes]]


class Ready(Protocol):
    """Says whether requests can be served."""

    def __call__(self) -> bool:
        """Asked for every request."""
        ...


class Gates:
    """The outermost application. `pages` are the paths of the page, open and never gated.

    Without `is_ready` no route can answer. Without `is_serving` generations wait: only who asks for
    the health is told, and what for: for another model (`is_changing`), or for the pools.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: GatewayOptions,
        keys: Keys,
        *,
        is_ready: Ready,
        is_serving: Ready,
        is_changing: Ready,
        pages: frozenset[str],
    ) -> None:
        self._app = app
        self._options = options
        self._is_ready = is_ready
        self._is_serving = is_serving
        self._is_changing = is_changing
        self._pages = pages
        self._health = frozenset(f"{options.api_prefix}{path}" for path in PUBLIC)
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers at the first gate that stays shut, else hands the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        added = [(b"server", b"llama.cpp"), *self._origin(headers)]
        refusal = self._refusal(scope, headers)
        await (refusal or self._app)(scope, receive, _adding(send, added))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        if scope["method"] == "OPTIONS":
            return self._preflight()
        path: str = scope["path"]
        if not self._is_ready() and path not in self._pages:
            return _error(503, "Loading model", "unavailable_error")
        if path in self._health and not self._is_serving():
            cause = "Loading model" if self._is_changing() else "Rebuilding memory pools"
            return _error(503, cause, "unavailable_error")
        if self._is_open(path) or self._keys.knows(presented_key(headers)):
            return None
        return _error(401, "Invalid API Key", "authentication_error")

    def _preflight(self) -> Response:
        options = self._options
        # Set by hand: a media type would gain a charset that the peer does not send.
        return Response(
            headers={
                "access-control-allow-credentials": "true" if options.cors_credentials else "false",
                "access-control-allow-methods": options.cors_methods,
                "access-control-allow-headers": options.cors_headers,
                "content-type": "text/html",
            }
        )

    def _origin(self, headers: Headers) -> RawHeaders:
        allowed, origin = self._options.cors_origins, headers.get("origin", "")
        if allowed == "*" and self._options.cors_credentials:
            # Browsers refuse `*` beside credentials; an absent origin is echoed as an empty one.
            allowed = origin
        elif allowed == "localhost":
            if not _is_local(origin):
                return ()
            allowed = origin
        return ((b"access-control-allow-origin", allowed.encode("latin-1")),)

    def _is_open(self, path: str) -> bool:
        return self._keys.is_open or path in PUBLIC or path in self._pages


def presented_key(headers: Headers) -> str:
    """The key that a client sent: `Authorization`, or `X-Api-Key` where that is empty."""
    key = headers.get("authorization", "") or headers.get("x-api-key", "")
    return key.removeprefix(_BEARER)


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in _LOCAL_HOSTS
    except ValueError:
        return False


def _adding(send: Send, headers: RawHeaders) -> Send:
    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *headers]
        await send(message)

    return add


def _error(status: int, message: str, kind: str) -> Response:
    # Written by the peer's outer layer, hence another order of keys than its handlers have.
    return json_response({"error": {"message": message, "type": kind, "code": status}}, status)
