"""Fetches for a page what its browser may not: GET and POST of any address, once switched on.

Whoever reaches the route reaches what this machine reaches, so it is off unless an operator says
otherwise. Only headers that the page marks are passed on, never its own: a key of this server goes
nowhere.

Source: llama-server's route of the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.disabled import feature_disabled
from gateway.errors import server_fault
from gateway.exchange import Exchange

_MARK = "x-llama-server-proxy-header-"
_CONNECT_S = 10.0
_TIMEOUT_S = 600.0
_PIECE_BYTES = 1 << 16
# Of one connection alone, or set anew by the server.
_OWN = frozenset(
    {"connection", "transfer-encoding", "content-length", "keep-alive", "server", "date"}
)
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_LOG = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Target:
    """Where a request goes. `port` None is the scheme's."""

    scheme: str
    host: str
    port: int | None
    path: str


async def cors_proxy(exchange: Exchange) -> Response:
    """GET and POST /cors-proxy?url=.

    Raises:
        ApiError: The address is none, or nobody answers there.
    """
    if not exchange.options.has_cors_proxy:
        return await feature_disabled(exchange)
    request = exchange.request
    target = _target(request.query_params.get("url", ""))
    body = await exchange.connection.body() if request.method == "POST" else None
    _LOG.info("proxying %s to %s://%s", request.method, target.scheme, target.host)
    fetch = _Fetch(target)
    try:
        opening = fetch.run(lambda: fetch.open(request.method, body, _headers(request)))
        response = await exchange.connection.while_connected(opening)
    except BaseException:
        fetch.end()
        raise
    kept = {name: value for name, value in response.getheaders() if name.lower() not in _OWN}
    if response.status in (204, 304):
        fetch.end()
        return Response(status_code=response.status, headers=kept)
    return StreamingResponse(_pieces(fetch, response), response.status, kept)


class _Fetch:
    """One request, on a thread of its own: many pages may each hold an answer open for long."""

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._connection = _CONNECTIONS[target.scheme](target.host, target.port, timeout=_CONNECT_S)
        self._socket: socket.socket | None = None
        self._thread = ThreadPoolExecutor(1, "cors-proxy")

    async def run(self, work: Callable[[], T]) -> T:
        """Does something that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def open(
        self, method: str, body: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Blocking: sends the request and reads the head of the answer."""
        try:
            self._connection.connect()
            # The connection forgets it where the answer ends with it.
            self._socket = self._connection.sock
            assert self._socket is not None, "it is connected"
            self._socket.settimeout(_TIMEOUT_S)
            self._connection.request(method, self._target.path, body, dict(headers))
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise server_fault(f"proxy error: {error}") from error

    def end(self) -> None:
        """Closes without waiting: a thread that reads holds what closing needs, so it is woken."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.submit(self._connection.close)
        self._thread.shutdown(wait=False)


def _target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise server_fault(f"invalid target URL: {error}") from error
    if not parts.hostname:
        raise server_fault("invalid target URL: missing host")
    if parts.username is not None or parts.password is not None:
        raise server_fault("authentication in target URL is not supported")
    if parts.scheme not in _CONNECTIONS:
        raise server_fault(f"unsupported URL scheme in target URL: {parts.scheme}")
    path = parts.path or "/"
    return _Target(
        parts.scheme, parts.hostname, port, path + (f"?{parts.query}" if parts.query else "")
    )


def _headers(request: Request) -> dict[str, str]:
    return {
        name.removeprefix(_MARK): value
        for name, value in request.headers.items()
        if name.startswith(_MARK) and name != _MARK
    }


async def _pieces(fetch: _Fetch, response: http.client.HTTPResponse) -> AsyncGenerator[bytes, None]:
    try:
        while piece := await fetch.run(lambda: response.read1(_PIECE_BYTES)):
            yield piece
    finally:
        fetch.end()
