from __future__ import annotations

import json
import re
from typing import Any

import httpx
from kvarts.v1 import generation_pb2

from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService
from tests.unit.gateway.scripts import text_script

KEYS = ["choices", "created", "model", "system_fingerprint", "object", "usage", "id", "timings"]


def read_stream(text: str) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


async def test_one_answer(client: httpx.AsyncClient):
    body = {"prompt": "Hi", "max_tokens": 2, "echo": True, "suffix": "x", "best_of": 3}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert list(answer) == KEYS
    assert answer["choices"] == [
        {"text": "ab", "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "completion_tokens": 2,
        "prompt_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert re.fullmatch(r"chatcmpl-[0-9A-Za-z]{32}", answer["id"])
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny.gguf")
    assert answer["system_fingerprint"] == "b1-0000000"


async def test_stopped_by_the_model(client: httpx.AsyncClient, service: FakeService):
    service.script = text_script("a", finish_reason=generation_pb2.FINISH_REASON_EOS)
    answer = (await client.post("/v1/completions", json={"prompt": "Hi"})).json()
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_batch_and_samples_are_choices(client: httpx.AsyncClient):
    body = {"prompt": ["A", "BB"], "n": 2, "max_tokens": 1}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_verbose_shows_the_native_answer(client: httpx.AsyncClient):
    body = {"prompt": "Hi", "verbose": True}
    answer = (await client.post("/v1/completions", json=body)).json()
    assert list(answer)[-2:] == ["__verbose", "timings"]
    assert answer["__verbose"]["prompt"] == "<s>Hi"


async def test_a_verbose_server(serve: Serve):
    async with serve(is_verbose=True) as client:
        answer = (await client.post("/v1/completions", json={"prompt": "Hi"})).json()
        assert answer["__verbose"]["content"] == "abc"
        body = {"prompt": "Hi", "verbose": False}
        assert "__verbose" not in (await client.post("/v1/completions", json=body)).json()


async def test_what_is_withheld_at_the_end_is_an_event_before_the_last(
    client: httpx.AsyncClient, service: FakeService
):
    service.script = text_script("a", unsent_text="b")
    body = {"prompt": "Hi", "stream": True, "verbose": True}
    response = await client.post("/v1/completions", json=body)
    first, rest, last = read_stream(response.text)
    choices = [event["choices"][0] for event in (first, rest, last)]
    assert [choice["text"] for choice in choices] == ["a", "b", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [event["__verbose"]["content"] for event in (first, rest, last)] == ["a", "b", ""]
    assert "usage" not in rest


async def test_stream(client: httpx.AsyncClient):
    body = {"prompt": "Hi", "max_tokens": 2, "stream": True}
    response = await client.post("/v1/completions", json=body)
    first, second, last = read_stream(response.text)
    assert list(first) == ["choices", "created", "model", "system_fingerprint", "object", "id"]
    assert first["choices"] == [{"text": "a", "index": 0, "logprobs": None, "finish_reason": None}]
    assert list(last) == KEYS
    assert last["choices"][0] == {
        "text": "",
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
    }
    assert len({first["id"], second["id"], last["id"]}) == 1


async def test_errors_are_the_native_ones(client: httpx.AsyncClient):
    response = await client.post("/v1/completions", json={"max_tokens": 1})
    assert response.status_code == 400
    assert "'prompt'" in response.json()["error"]["message"]
