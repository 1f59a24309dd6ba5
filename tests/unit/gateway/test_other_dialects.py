"""`/v1/messages` and `/v1/responses`: answers and streams, over a scripted service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from kvarts.v1 import generation_pb2

from gateway.anthropic import MessagesDialect
from gateway.facts import Facts, gather
from gateway.options import GatewayOptions
from gateway.reply import ChatDelta
from gateway.responses import ResponsesDialect
from tests.unit.gateway.fake_service import FakeService
from tests.unit.gateway.scripts import Call, Response, chunk, finished, started, text_script

USER = {"role": "user", "content": "Hi"}
MESSAGES: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
INPUT: dict[str, Any] = {"input": "Hi", "max_output_tokens": 2}
GROWN = [
    ChatDelta(reasoning="h"),
    ChatDelta(reasoning="m"),
    ChatDelta(content="a"),
    ChatDelta(content="b"),
    ChatDelta(tool_call=generation_pb2.ToolCallDelta(index=0, id="1", name="f")),
    ChatDelta(tool_call=generation_pb2.ToolCallDelta(index=0, arguments_json='{"x":')),
    ChatDelta(tool_call=generation_pb2.ToolCallDelta(index=0, arguments_json="1}")),
    ChatDelta(tool_call=generation_pb2.ToolCallDelta(index=1, id="2", name="g")),
]


def read_named(text: str) -> list[tuple[str, Any]]:
    events: list[tuple[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return read_named(response.text) if body.get("stream") else response.json()


async def stopped(call: Call) -> AsyncIterator[Response]:
    yield started(call, cached=2)
    yield chunk("a", 5, 1)
    yield finished(
        call, 1, finish_reason=generation_pb2.FINISH_REASON_STOP, stop_string="b", cached_tokens=2
    )


async def broken(call: Call) -> AsyncIterator[Response]:
    yield started(call)
    yield chunk("a", 5, 1)


class TestMessages:
    async def test_one_answer(self, client: httpx.AsyncClient) -> None:
        answer = await _post(client, "/v1/messages", MESSAGES)
        assert answer.pop("id").startswith("chatcmpl-")
        assert answer == {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": "ab"}],
            "model": "tiny.gguf",
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "cache_read_input_tokens": 0,
                "input_tokens": answer["usage"]["input_tokens"],
                "output_tokens": 2,
            },
        }

    async def test_a_stop_sequence_and_the_cache_are_shown(
        self, client: httpx.AsyncClient, service: FakeService
    ) -> None:
        service.script = stopped
        answer = await _post(client, "/v1/messages", MESSAGES | {"stop_sequences": ["b"]})
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", "b")
        assert answer["usage"]["cache_read_input_tokens"] == 2
        assert list(service.calls[0].request.stop) == ["b"]

    async def test_stream(self, client: httpx.AsyncClient) -> None:
        events = await _post(client, "/v1/messages", MESSAGES | {"stream": True})
        assert [name for name, _ in events] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_delta",
            "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        assert all(data["type"] == name for name, data in events)
        assert events[0][1]["message"]["usage"]["output_tokens"] == 0
        texts = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
        assert texts == ["a", "b"]

    @pytest.mark.parametrize("is_first", [False, True])
    async def test_what_is_withheld_at_the_end_is_sent(
        self, client: httpx.AsyncClient, service: FakeService, is_first: bool
    ) -> None:
        service.script = text_script("" if is_first else "a", unsent_text="b")
        events = await _post(client, "/v1/messages", MESSAGES | {"stream": True})
        texts = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
        assert "".join(texts) == ("b" if is_first else "ab")
        assert [name for name, _ in events].count("content_block_start") == 1

    async def test_an_error_in_a_stream_is_an_event(
        self, client: httpx.AsyncClient, service: FakeService
    ) -> None:
        service.script = broken
        events = await _post(client, "/v1/messages", MESSAGES | {"stream": True})
        assert events[-1][0] == "error"
        assert events[-1][1]["type"] == "server_error"

    async def test_tokens_are_counted(self, client: httpx.AsyncClient) -> None:
        counted = await _post(client, "/v1/messages/count_tokens", MESSAGES)
        answer = await _post(client, "/v1/messages", MESSAGES)
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


class TestResponses:
    async def test_one_answer(self, client: httpx.AsyncClient) -> None:
        answer = await _post(client, "/v1/responses", INPUT)
        assert answer["id"].startswith("resp_")
        (item,) = answer["output"]
        assert item["id"].startswith("msg_")
        assert item["content"] == [
            {"type": "output_text", "annotations": [], "logprobs": [], "text": "ab"}
        ]
        used = answer["usage"]
        assert used["input_tokens"] + used["output_tokens"] == used["total_tokens"]

    @pytest.mark.parametrize("path", ["/v1/responses", "/responses"])
    async def test_stream(self, client: httpx.AsyncClient, path: str) -> None:
        events = await _post(client, path, INPUT | {"stream": True})
        assert [name for name, _ in events] == [
            "response.created", "response.in_progress", "response.output_item.added",
            "response.content_part.added", "response.output_text.delta",
            "response.output_text.delta", "response.output_text.done",
            "response.content_part.done", "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert events[6][1]["text"] == "ab"
        assert events[-1][1]["response"]["output"] == [events[-2][1]["item"]]

    async def test_progress_is_told(self, client: httpx.AsyncClient, service: FakeService) -> None:
        async def script(call: Call) -> AsyncIterator[Response]:
            yield started(call)
            yield Response(progress=generation_pb2.Progress(total_tokens=3, processed_tokens=3))
            yield chunk("a", 5, 1)
            yield finished(call, 1)

        service.script = script
        events = await _post(
            client, "/v1/responses", INPUT | {"stream": True, "return_progress": True}
        )
        assert [name for name, _ in events[:3]] == [
            "response.created", "response.in_progress", "response.output_item.added"
        ]  # fmt: skip
        assert events[1][1]["prompt_progress"]["total"] == 3

    async def test_an_error_in_a_stream_has_no_name(
        self, client: httpx.AsyncClient, service: FakeService
    ) -> None:
        service.script = broken
        response = await client.post("/v1/responses", json=INPUT | {"stream": True})
        last = response.text.removesuffix("\n\n").split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 500

    async def test_tokens_are_counted(self, client: httpx.AsyncClient) -> None:
        counted = await _post(client, "/v1/responses/input_tokens", INPUT)
        answer = await _post(client, "/v1/responses", INPUT)
        assert counted == {
            "input_tokens": answer["usage"]["input_tokens"],
            "object": "response.input_tokens",
        }


@pytest.fixture
def facts(service: FakeService) -> Facts:
    return gather(service.model, service.info, GatewayOptions(service=""))


def _grow(dialect: Any, deltas: Sequence[ChatDelta]) -> list[tuple[str, Any]]:
    events = [event for delta in deltas for event in dialect.grown(delta)]
    return [(event["event"], event["data"]) for event in events]


class TestGrowth:
    """Reasoning and calls, as a parsed answer brings them."""

    async def test_messages_have_a_block_each(self, facts: Facts) -> None:
        events = _grow(MessagesDialect(facts, prefill=()), GROWN)
        starts = [
            (d["index"], d["content_block"]["type"]) for n, d in events if n.endswith("start")
        ]
        assert starts == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
        pieces = [(d["index"], d["delta"]["type"]) for n, d in events if n.endswith("delta")]
        assert pieces == [
            (0, "thinking_delta"), (0, "thinking_delta"), (1, "text_delta"), (1, "text_delta"),
            (2, "input_json_delta"), (2, "input_json_delta"),
        ]  # fmt: skip

    async def test_responses_have_an_item_each(self, facts: Facts) -> None:
        events = _grow(ResponsesDialect(facts, prefill=()), GROWN)
        added = [d["item"]["type"] for n, d in events if n == "response.output_item.added"]
        assert added == ["reasoning", "message", "function_call", "function_call"]
        arguments = [(d["item_id"], d["delta"]) for n, d in events if "arguments" in n]
        assert arguments == [("fc_1", '{"x":'), ("fc_1", "1}")]
