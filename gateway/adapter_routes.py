"""The routes of LoRA adapters, with the peer's bodies."""

from __future__ import annotations

from kvarts.v1 import lora_pb2
from starlette.responses import Response

from gateway.adapters import known_adapters
from gateway.connection import json_response
from gateway.errors import invalid
from gateway.exchange import Exchange
from gateway.fields import Adapters, Refusal
from gateway.peer_json import Json
from gateway.service import answer


async def list_adapters(exchange: Exchange) -> Response:
    """GET /lora-adapters."""
    backend = exchange.backend
    request = lora_pb2.ListAdaptersRequest()
    reply = await answer(backend.service.lora.ListAdapters(request, metadata=backend.metadata))
    return json_response([_adapter_json(adapter) for adapter in reply.adapters])


async def set_adapter_scales(exchange: Exchange) -> Response:
    """POST /lora-adapters; what is not listed becomes 0, entries without a valid id are skipped."""
    body = await exchange.connection.json()
    if not isinstance(body, list):
        raise invalid("Request body must be an array")
    try:
        named = Adapters().read(body)
    except Refusal as refusal:
        raise invalid(str(refusal)) from refusal
    backend = exchange.backend
    known = await exchange.connection.while_connected(
        known_adapters(backend.service, named, backend.metadata)
    )
    request = lora_pb2.SetAdapterScalesRequest(scales=known.message)
    call = backend.service.lora.SetAdapterScales(request, metadata=backend.metadata)
    await exchange.connection.while_connected(answer(call))
    response = json_response({"success": True})
    response.headers.update(known.headers)
    return response


def _adapter_json(adapter: lora_pb2.Adapter) -> Json:
    members: dict[str, Json] = {
        "id": adapter.id,
        "path": adapter.path,
        "scale": adapter.scale,
        "task_name": adapter.task_name,
        "prompt_prefix": adapter.prompt_prefix,
    }
    if adapter.alora_invocation_tokens:
        members["alora_invocation_string"] = adapter.alora_invocation_string
        members["alora_invocation_tokens"] = list(adapter.alora_invocation_tokens)
    return members
