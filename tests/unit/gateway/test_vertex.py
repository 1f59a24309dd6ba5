"""Vertex AI's prediction route in front of a fake service."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from gateway.options import GatewayOptions
from gateway.routes import route_table
from gateway.vertex import MAX_INSTANCES, request_format, vertex_routes
from tests.unit.gateway.conftest import Serve

CHAT = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "chatCompletions"),
        ("/apply-template", "applyTemplate"),
        ("/lora-adapters", "loraAdapters"),
        ("/v1/messages/count_tokens", "messagesCountTokens"),
        ("/health", "health"),
    ],
)
def test_names_of_routes(path: str, name: str):
    assert request_format(path) == name


async def _predict(client: httpx.AsyncClient, *instances: Any) -> list[Any]:
    answer = await client.post("/predict", json={"instances": list(instances)})
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]


def _strip(value: Any) -> Any:
    """Without what differs between any two answers."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        volatile = {"id", "created", "timings"}
        return {key: _strip(inner) for key, inner in members.items() if key not in volatile}
    if isinstance(value, list):
        return [_strip(inner) for inner in cast("list[Any]", value)]
    return value


async def test_an_instance_is_answered_as_its_route_does(serve: Serve):
    async with serve(vertex_predict_path="/predict") as client:
        body = {key: value for key, value in CHAT.items() if not key.startswith("@")}
        alone = (await client.post("/v1/chat/completions", json=body)).json()
        tokens = (await client.post("/tokenize", json={"content": "ab"})).json()
        path = CHAT | {"@requestFormat": "/v1/chat/completions", "stream": True}
        answers = await _predict(
            client, CHAT, path, {"@requestFormat": "tokenize", "content": "ab"}
        )
        assert [_strip(answer) for answer in answers] == [_strip(alone)] * 2 + [tokens]
        # Of the two routes of that name OpenAI's is meant.
        (text,) = await _predict(client, {"@requestFormat": "completions", "prompt": "a"})
        assert text["object"] == "text_completion"


async def test_what_a_route_refuses_is_its_prediction(serve: Serve):
    async with serve(vertex_predict_path="/predict") as client:
        answers = await _predict(
            client,
            {"@requestFormat": "chatCompletions"},
            {"@requestFormat": "nothing"},
            {"@requestFormat": "/slots/{id_slot}"},
            {"prompt": "a"},
            7,
        )
        assert [answer["error"]["code"] for answer in answers] == [400] * 5
        assert [answer["error"]["message"] for answer in answers[1:]] == [
            "no handler registered for @requestFormat: nothing",
            "no handler registered for @requestFormat: /slots/{id_slot}",
            "each instance must include a string @requestFormat",
            "each instance must be a JSON object",
        ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "parse error"),
        (b"[]", "request body must be a JSON object"),
        (b"{}", "request body must include an array field named instances"),
        (b'{"instances": 7}', "request body must include an array field named instances"),
        (b'{"instances": [' + b"1," * MAX_INSTANCES + b"1]}", "exceeds maximum size of 128"),
    ],
)
async def test_bad_bodies(serve: Serve, body: bytes, message: str):
    async with serve(vertex_predict_path="/predict") as client:
        answer = await client.post("/predict", content=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


async def test_health_has_another_name_too(serve: Serve):
    async with serve(vertex_predict_path="/p", vertex_health_path="/alive") as client:
        assert (await client.get("/alive")).json() == {"status": "ok"}
    async with serve() as client:
        assert (await client.post("/predict", json={"instances": []})).status_code == 404


async def test_the_key_opens_it(serve: Serve):
    async with serve(vertex_predict_path="/predict", api_keys=("key",)) as client:
        assert (await client.post("/predict", json={"instances": []})).status_code == 401


def test_a_route_that_is_there_already_ends_the_start():
    options = GatewayOptions(service="a:1", vertex_predict_path="/completion")
    with pytest.raises(ValueError, match="AIP_PREDICT_ROUTE '/completion' is a route of this"):
        vertex_routes(options, route_table())
