"""Vertex AI's prediction protocol: several requests of other routes in one body.

Source: llama-server's route of the same purpose; Google Cloud, "Custom container requirements".
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive

from gateway import peer_json
from gateway.connection import Connection, json_response
from gateway.errors import ApiError, ErrorKind, invalid
from gateway.exchange import Exchange, Handler
from gateway.ops import health
from gateway.options import GatewayOptions
from gateway.peer_json import Json, UnreadableJson
from gateway.presence import ClientGone
from gateway.sse import EventStream
from gateway.together import together

MAX_INSTANCES = 128
_FORMAT = "@requestFormat"
_BREAK = re.compile("[/_-]+(.?)")
_LOG = logging.getLogger(__name__)

RouteRow = tuple[str, Sequence[str], Handler]


def vertex_routes(options: GatewayOptions, table: Sequence[RouteRow]) -> list[RouteRow]:
    """Its routes, to stand behind those of `table`, which they hand instances on to; maybe none.

    Raises:
        ValueError: A route is there already.
    """
    if not options.vertex_predict_path:
        return []
    handlers: dict[str, Handler] = {}
    for _, paths, handler in table:
        for path in paths:
            handlers.setdefault(path, handler)
    if options.vertex_predict_path in handlers:
        raise ValueError(
            f"AIP_PREDICT_ROUTE {options.vertex_predict_path!r} is a route of this server already"
        )
    routes: list[RouteRow] = [("POST", (options.vertex_predict_path,), _predicting(handlers))]
    if options.vertex_health_path and options.vertex_health_path not in handlers:
        routes.append(("GET", (options.vertex_health_path,), health))
    return routes


def request_format(path: str) -> str:
    """The camelCase name of a route: `/v1/chat/completions` is `chatCompletions`."""
    bare = path.removeprefix("/v1").removeprefix("/")
    return _BREAK.sub(lambda found: found[1].upper(), bare)


def _predicting(handlers: Mapping[str, Handler]) -> Handler:
    formats: dict[str, Handler] = {}
    # Of two names that differ in /v1 alone OpenAI's is meant.
    for path in sorted(handlers, key=lambda path: not path.startswith("/v1/")):
        if "{" not in path:
            formats.setdefault(request_format(path), handlers[path])
            formats.setdefault(path, handlers[path])

    async def predict(exchange: Exchange) -> Response:
        instances = await _instances(exchange.connection)
        # As with many prompts in one body, no more of them run or wait than there are slots.
        turns = asyncio.Semaphore(max(1, exchange.backend.facts.info.num_slots))

        async def answer(instance: Json) -> Json:
            async with turns:
                return await _prediction(exchange, formats, instance)

        async def answers() -> list[Json]:
            async with together() as works:
                tasks = [works.create_task(answer(instance)) for instance in instances]
            return [task.result() for task in tasks]

        return json_response({"predictions": await exchange.connection.while_connected(answers())})

    return predict


async def _instances(connection: Connection) -> Sequence[Json]:
    try:
        body: Any = peer_json.read(await connection.body())
    except UnreadableJson as error:
        raise invalid(str(error)) from error
    if not isinstance(body, dict):
        raise invalid("request body must be a JSON object")
    instances = cast("dict[str, Any]", body).get("instances")
    if not isinstance(instances, list):
        raise invalid("request body must include an array field named instances")
    found = cast("list[Json]", instances)
    if len(found) > MAX_INSTANCES:
        raise invalid(f"instances array exceeds maximum size of {MAX_INSTANCES}")
    return found


async def _prediction(exchange: Exchange, formats: Mapping[str, Handler], instance: Json) -> Json:
    """What a route answers to an instance; an error is an answer as well."""
    try:
        handler, payload = _dispatched(formats, instance)
        answer = await handler(_within(exchange, peer_json.write(payload)))
        if isinstance(answer, EventStream):
            await answer.frames.aclose()
            raise invalid("predict route does not support streaming responses")
        return _value(bytes(answer.body))
    except ApiError as error:
        return {"error": error.body.to_json()}
    except UnreadableJson as error:
        return {"error": ApiError(ErrorKind.SERVER, str(error)).body.to_json()}
    except ClientGone:
        raise
    except Exception:
        _LOG.exception("an instance failed")
        return {"error": ApiError(ErrorKind.SERVER, "internal error").body.to_json()}


def _dispatched(formats: Mapping[str, Handler], instance: Json) -> tuple[Handler, dict[str, Json]]:
    if not isinstance(instance, dict):
        raise invalid("each instance must be a JSON object")
    payload = dict(instance)
    wanted = payload.pop(_FORMAT, None)
    if not isinstance(wanted, str):
        raise invalid(f"each instance must include a string {_FORMAT}")
    handler = formats.get(wanted)
    if handler is None:
        raise invalid(f"no handler registered for {_FORMAT}: {wanted}")
    if "stream" in payload:
        payload["stream"] = False
    return handler, payload


def _within(exchange: Exchange, body: bytes) -> Exchange:
    """The same exchange with a body of its own; whether its client leaves is the outer's matter."""
    request = Request(exchange.request.scope, _receiving(body))
    connection = Connection(request, exchange.connection.stall_s)
    return replace(exchange, request=request, connection=connection)


def _receiving(body: bytes) -> Receive:
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        return await asyncio.get_running_loop().create_future()

    return receive


def _value(text: bytes) -> Json:
    """JSON as itself, anything else as text."""
    if not text:
        return None
    try:
        return peer_json.read(text)
    except UnreadableJson:
        return text.decode("utf-8", "replace")
