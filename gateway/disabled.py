"""The peer's routes that this server, or this build, answers without serving."""

from __future__ import annotations

from starlette.responses import Response

from gateway.connection import json_response
from gateway.errors import not_supported
from gateway.exchange import Exchange, Handler
from gateway.facts import Facts


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


async def infill(exchange: Exchange) -> Response:
    """POST /infill: the vocabulary's fault where it lacks a token, else this build's."""
    await exchange.connection.body()
    missing = missing_fim_tokens(exchange.backend.facts)
    if missing:
        raise not_supported(f"Infill is not supported by this model: {missing}")
    raise not_supported("not supported: infill")


def missing_fim_tokens(facts: Facts) -> str:
    """Names the fill-in-the-middle tokens that the vocabulary lacks, in the peer's words."""
    tokens = facts.model.special_tokens
    present = {
        "prefix": tokens.HasField("fim_pre"),
        "suffix": tokens.HasField("fim_suf"),
        "middle": tokens.HasField("fim_mid"),
    }
    return "".join(
        f"{name} token is missing. " for name, is_there in present.items() if not is_there
    )
