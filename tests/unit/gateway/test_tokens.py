from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.unit.gateway.scripts import BOS, encode


async def test_tokenize(client: httpx.AsyncClient):
    async def ask(**body: Any) -> Any:
        return (await client.post("/tokenize", json=body)).json()

    assert await ask(content="Hi") == {"tokens": encode("Hi")}
    assert await ask(content="Hi", add_special=True) == {"tokens": [BOS, *encode("Hi")]}
    assert await ask(content="Hi", add_special="yes") == {"tokens": encode("Hi")}
    assert await ask(content=["H", 9], add_special=True) == {"tokens": [BOS, *encode("H"), 9]}
    assert await ask() == {"tokens": []}
    assert await ask(content="aé", with_pieces=True) == {
        "tokens": [
            {"id": encode("a")[0], "piece": "a"},
            {"id": 0xC3 + 3, "piece": [0xC3]},
            {"id": 0xA9 + 3, "piece": [0xA9]},
        ]
    }


async def test_detokenize(client: httpx.AsyncClient):
    async def ask(**body: Any) -> Any:
        return (await client.post("/detokenize", json=body)).json()

    assert await ask(tokens=[BOS, *encode("é!")]) == {"content": "<s>é!"}
    assert await ask(tokens=[0xC3 + 3]) == {"content": "\ufffd"}
    assert await ask() == {"content": ""}


@pytest.mark.parametrize("token", [-1, 99999, 2**31, 2**64, 10**30, 1e300])
async def test_tokens_outside_the_vocabulary_are_refused(client: httpx.AsyncClient, token: float):
    response = await client.post("/tokenize", json={"content": ["a", token]})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Prompt contains invalid tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"content": ["a", None]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
async def test_wrong_types_are_the_peers_500(client: httpx.AsyncClient, path: str, body: Any):
    response = await client.post(path, json=body)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
