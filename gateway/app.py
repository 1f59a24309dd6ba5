"""The ASGI application: routes behind the gates, errors in the peer's form, the watch on the service.

Example:
    >>> app = make_app(GatewayOptions(service="127.0.0.1:50051"), service)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler

from gateway.backend import Backend
from gateway.connection import Connection, json_response
from gateway.errors import ApiError, ErrorKind, ModelChanged, server_fault
from gateway.exchange import Exchange, Handler
from gateway.gates import Gates, presented_key
from gateway.keys import Keys
from gateway.openapi import openapi_route
from gateway.options import GatewayOptions
from gateway.page import page_routes
from gateway.peer_json import UnreadableJson
from gateway.presence import ClientGone
from gateway.readiness import Readiness
from gateway.reload import Reloads
from gateway.replies import ROUTE, Replies, WatchedReplies
from gateway.routes import WAITING, route_table
from gateway.service import Service, credentials
from gateway.sse import EventStream
from gateway.tracing import PASSED_ON, Spans, trace_of
from gateway.vertex import vertex_routes

# Nobody reads it: the connection is closed.
_CLIENT_GONE_STATUS = 499
# So often a request is made anew for another model; a service where it goes on changes too fast.
_MAX_CHANGES = 3


def make_app(
    options: GatewayOptions,
    service: Service,
    *,
    keys: Keys | None = None,
    reloads: Reloads | None = None,
    spans: Spans = PASSED_ON,
) -> ASGIApp:
    """Builds the application over an open connection, which its caller closes, as it does `spans`.

    `keys` are those of the options unless the caller has read them; `reloads` are only shown.

    Raises:
        ValueError: Options name a route that is there already.
    """
    readiness = Readiness(service, options)
    reloads = reloads or Reloads()
    replies = Replies()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        del app
        watching = asyncio.create_task(readiness.watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    table = route_table()
    keys = keys or Keys(options)
    document = openapi_route(table, options.api_prefix, lambda: not keys.is_open)
    table += [document, *vertex_routes(options, table)]
    routes = [
        Route(
            f"{options.api_prefix}{path}",
            _endpoint(path, handler, options, service, readiness, replies, reloads),
            methods=[method],
        )
        for method, paths, handler in table
        for path in paths
    ]
    app = Starlette(
        routes=[*routes, *page_routes(options)],
        exception_handlers=_exception_handlers(),
        lifespan=lifespan,
    )
    # A trailing slash is another path to the peer.
    app.router.redirect_slashes = False
    pages = frozenset({"/", "/index.html"}) if options.has_ui else frozenset({"/"})
    gates = Gates(
        app,
        options,
        keys,
        is_ready=lambda: readiness.facts is not None,
        is_serving=lambda: readiness.is_serving,
        is_changing=lambda: readiness.change.is_on,
        pages=pages,
    )
    return WatchedReplies(gates, replies, spans)


def _endpoint(
    path: str,
    handler: Handler,
    options: GatewayOptions,
    service: Service,
    readiness: Readiness,
    replies: Replies,
    reloads: Reloads,
):
    waits = handler in WAITING or path == options.vertex_predict_path

    async def endpoint(request: Request) -> Response | EventStream:
        request.scope[ROUTE] = path
        connection = Connection(request, options.timeout_s)
        for _ in range(_MAX_CHANGES):
            try:
                return await answered(request, connection)
            except ModelChanged:
                # Nothing was sent yet, and what is known is of a model that has gone.
                await readiness.renew()
        return await answered(request, connection)

    async def answered(request: Request, connection: Connection) -> Response | EventStream:
        if readiness.change.is_on and waits:
            await readiness.change.wait(connection)
        facts = readiness.facts
        if facts is None or readiness.change.is_on:
            raise ApiError(ErrorKind.UNAVAILABLE, "Loading model")
        key = credentials(presented_key(request.headers))
        metadata = (*key, *trace_of(request.scope))
        exchange = Exchange(
            request=request,
            connection=connection,
            backend=Backend(service, facts, metadata),
            options=options,
            replies=replies,
            reloads=reloads,
            renew=readiness.renew,
        )
        return await handler(exchange)

    return endpoint


def _exception_handlers() -> dict[object, ExceptionHandler]:
    handlers = {
        ApiError: _api_error,
        ClientGone: _client_gone,
        UnreadableJson: _unreadable,
        HTTPException: _http_exception,
        Exception: _bug,
    }
    return cast("dict[object, ExceptionHandler]", handlers)


async def _api_error(request: Request, error: ApiError) -> Response:
    del request
    body = error.body
    if body.kind is ErrorKind.NOT_FOUND:
        response = _not_found()
    else:
        response = json_response({"error": body.to_json()}, body.kind.status)
    response.headers.update(body.headers)
    return response


async def _unreadable(request: Request, error: UnreadableJson) -> Response:
    """What could be read but is too deep to be passed on is as good as unreadable."""
    return await _api_error(request, server_fault(str(error)))


async def _client_gone(request: Request, error: ClientGone) -> Response:
    del request, error
    return Response(status_code=_CLIENT_GONE_STATUS)


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """An unknown path, or a known one with another method: the peer does not tell them apart."""
    del request, error
    return _not_found()


async def _bug(request: Request, error: Exception) -> Response:
    """A fault of ours. The framework logs it; the client learns only that it happened."""
    del request, error
    message = "internal error"
    return json_response({"error": {"code": 500, "message": message, "type": "server_error"}}, 500)


def _not_found() -> Response:
    """The peer's one 404, which also replaces what handlers wrote."""
    error = {"message": "File Not Found", "type": "not_found_error", "code": 404}
    return json_response({"error": error}, 404)
