"""POST /admin/models/load: another model in the place of the one that is served.

Ours alone: llama-server's `/models/load` belongs to its router, which runs a process per model.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from typing import Any

import grpc.aio
from kvarts.v1 import model_pb2
from starlette.responses import Response

from gateway.connection import json_response
from gateway.errors import invalid
from gateway.exchange import Exchange
from gateway.fields import members_of
from gateway.peer_json import Json
from gateway.pools import as_ms, of_type, seconds
from gateway.rpc_errors import from_rpc

_FIELDS = ("path", "validate_only", "replace_first", "drain_timeout")


async def load_model(exchange: Exchange) -> Response:
    """POST /admin/models/load: answers when the model is served, or with why it is not.

    Raises:
        ApiError: an unknown key, a value of a wrong type, or a refusal.
    """
    connection, backend = exchange.connection, exchange.backend
    request = read_load(members_of(await connection.json()))
    call = backend.service.model.LoadModel(request, metadata=backend.metadata)
    try:
        loaded = await connection.while_connected(_end(call))
    finally:
        # A client that went away stops it there too.
        call.cancel()
    if not request.validate_only:
        await exchange.renew()
    return json_response(loaded_json(loaded))


def read_load(body: Mapping[str, Any]) -> model_pb2.LoadModelRequest:
    """Reads a body; `drain_timeout` is in seconds.

    Raises:
        ApiError: it is refused, naming the key.
    """
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        raise invalid(f'unknown key "{unknown[0][:80]}"; known are {", ".join(_FIELDS)}')
    request = model_pb2.LoadModelRequest(
        path=of_type(body, "path", str, "a string", default=""),
        validate_only=of_type(body, "validate_only", bool, "a boolean", default=False),
        replace_first=of_type(body, "replace_first", bool, "a boolean", default=False),
    )
    if body.get("drain_timeout") is not None:
        request.drain_timeout.CopyFrom(seconds(body["drain_timeout"]))
    return request


def loaded_json(loaded: model_pb2.LoadedModel) -> Json:
    """The model that is served, and how it came to be."""
    model, plan = loaded.model, loaded.plan
    available = plan.available_bytes if plan.HasField("available_bytes") else None
    return {
        "model": {"id": model.id, "path": model.path, "architecture": model.architecture},
        "plan": {
            "needed_bytes": plan.needed_bytes,
            "available_bytes": available,
            "side_by_side": plan.side_by_side,
        },
        "elapsed_ms": as_ms(loaded.elapsed),
        "unavailable_ms": as_ms(loaded.unavailable),
        "calls_on_old_model": loaded.calls_on_old_model,
    }


async def _end(call: AsyncIterable[model_pb2.LoadModelResponse]) -> model_pb2.LoadedModel:
    loaded = model_pb2.LoadedModel()
    try:
        async for reply in call:
            loaded = reply.loaded
    except grpc.aio.AioRpcError as error:
        raise from_rpc(error) from error
    return loaded
