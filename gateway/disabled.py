"""The peer's routes that this server, or this build, answers without serving."""

from __future__ import annotations

from starlette.responses import Response

from gateway.connection import json_response
from gateway.errors import not_supported
from gateway.exchange import Exchange, Handler


def refusing(message: str) -> Handler:
    """A handler that answers 501."""

    async def refuse(exchange: Exchange) -> Response:
        await exchange.connection.body()
        raise not_supported(message)

    return refuse


async def feature_disabled(exchange: Exchange) -> Response:
    """What the peer answers for tools and the proxy that were not switched on: 403, no code."""
    await exchange.connection.body()
    error = {"message": "this feature is disabled", "type": "feature_disabled"}
    return json_response({"error": error}, 403)
