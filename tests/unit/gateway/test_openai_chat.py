from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from kvarts.v1 import common_pb2, generation_pb2

from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService
from tests.unit.gateway.scripts import (
    Call,
    Response,
    chunk,
    finished,
    prompt_of,
    started,
    text_script,
)
from tests.unit.gateway.test_openai_completions import read_stream

USER = {"role": "user", "content": "Hi"}
PREFILL = {"role": "assistant", "content": "Once"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}


async def chat(client: httpx.AsyncClient, *messages: dict[str, Any], **body: Any) -> Any:
    response = await client.post("/v1/chat/completions", json={"messages": list(messages), **body})
    assert response.status_code == 200, response.text
    return read_stream(response.text) if body.get("stream") else response.json()


def content(events: list[Any]) -> list[Any]:
    return [choice["delta"] for event in events for choice in event["choices"]]


async def test_one_answer(client: httpx.AsyncClient, service: FakeService):
    answer = await chat(client, USER, max_tokens=2)
    assert list(answer) == [
        "choices",
        "created",
        "model",
        "system_fingerprint",
        "object",
        "usage",
        "id",
        "timings",
    ]
    assert answer["choices"] == [
        {
            "finish_reason": "length",
            "index": 0,
            "message": {"role": "assistant", "content": "ab"},
        }
    ]
    assert answer["object"] == "chat.completion"
    assert bytes(t - 3 for t in prompt_of(service.calls[0].request)[1:]) == (
        b"<user>Hi</><assistant>"
    )


async def test_stream(client: httpx.AsyncClient):
    events = await chat(client, USER, max_tokens=2, stream=True)
    assert content(events) == [
        {"role": "assistant", "content": None},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert list(events[0]) == [
        "choices",
        "created",
        "id",
        "model",
        "system_fingerprint",
        "object",
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert ["timings" in event for event in events] == [False, False, False, True]
    assert len({event["id"] for event in events}) == 1


async def test_stream_with_usage(client: httpx.AsyncClient):
    events = await chat(client, USER, stream=True, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert list(events[-1])[-2:] == ["usage", "timings"]
    assert "timings" not in events[-2]


async def test_held_text_sends_nothing(client: httpx.AsyncClient, service: FakeService):
    service.script = text_script("", "ab", "")
    assert content(await chat(client, USER, stream=True)) == [
        {"role": "assistant", "content": None},
        {"content": "ab"},
        {},
    ]


async def test_logprobs(client: httpx.AsyncClient, service: FakeService):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        token = generation_pb2.TokenLogprob(token_id=5, piece=b"a", logprob=-0.5)
        logprobs = generation_pb2.TokenLogprobs(sampled=token, top=[token])
        yield chunk("a", 5, 1, logprobs=logprobs)
        yield finished(call, 1)

    service.script = script
    token = {"id": 5, "token": "a", "bytes": [97], "logprob": -0.5}
    entries = {"content": [token | {"top_logprobs": [token]}]}
    answer = await chat(client, USER, logprobs=True)
    assert answer["choices"][0]["logprobs"] == entries
    assert service.calls[0].request.top_logprobs == 20
    events = await chat(client, USER, logprobs=True, top_logprobs=1, stream=True)
    assert [event["choices"][0].get("logprobs") for event in events] == [None, entries, None]
    assert service.calls[1].request.top_logprobs == 1


async def test_an_implied_prefill_is_repeated(client: httpx.AsyncClient, service: FakeService):
    answer = await chat(client, USER, PREFILL)
    assert answer["choices"][0]["message"]["content"] == "Onceabc"
    assert bytes(t - 3 for t in prompt_of(service.calls[0].request)[1:]) == (
        b"<user>Hi</><assistant>Once"
    )
    deltas = content(await chat(client, USER, PREFILL, stream=True))
    assert deltas[:3] == [
        {"role": "assistant", "content": None},
        {"content": "Oncea"},
        {"content": "b"},
    ]


async def test_a_continuation_that_was_asked_for_is_not(client: httpx.AsyncClient):
    asked: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await chat(client, USER, PREFILL, **asked)
    assert answer["choices"][0]["message"]["content"] == "Onceabc"
    deltas = content(await chat(client, USER, PREFILL, stream=True, **asked))
    assert deltas[1] == {"content": "a"}
    deltas = content(await chat(client, USER, PREFILL, stream=True, echo=True, **asked))
    assert deltas[1] == {"content": "Oncea"}


async def test_progress_repeats_the_role(client: httpx.AsyncClient, service: FakeService):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        yield Response(progress=generation_pb2.Progress(total_tokens=3, processed_tokens=3))
        yield chunk("a", 5, 1)
        yield finished(call, 1)

    service.script = script
    events = await chat(client, USER, stream=True, return_progress=True, timings_per_token=True)
    assert [list(event)[6:] for event in events] == [
        ["timings", "prompt_progress"],
        [],
        ["timings"],
        ["timings"],
    ]


async def test_verbose_shows_how_the_turn_was_opened(client: httpx.AsyncClient):
    answer = await chat(client, USER, verbose=True)
    settings = answer["__verbose"]["generation_settings"]
    assert settings["chat_format"] == "peg-native"
    assert settings["generation_prompt"] == "<assistant>"


async def test_without_jinja_turns_are_closed(serve: Serve, service: FakeService):
    async with serve(use_jinja=False) as client:
        answer = await chat(client, USER, PREFILL, verbose=True)
        assert answer["choices"][0]["message"]["content"] == "abc"
        assert answer["__verbose"]["generation_settings"]["chat_format"] == "Content-only"
    assert bytes(t - 3 for t in prompt_of(service.calls[0].request)[1:]) == (
        b"<user>Hi</><assistant>Once</>"
    )


async def test_closed_where_the_server_says_so(serve: Serve, service: FakeService):
    async with serve(prefill_assistant=False) as client:
        await chat(client, USER, PREFILL)
    assert bytes(t - 3 for t in prompt_of(service.calls[0].request)[1:]).endswith(
        b"<assistant>Once</><assistant>"
    )


async def test_counting_and_rendering(client: httpx.AsyncClient):
    body = {"messages": [USER]}
    rendered = await client.post("/apply-template", json=body)
    assert rendered.json() == {"prompt": "<user>Hi</><assistant>"}
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        counted = await client.post(path, json=body)
        assert counted.content == b'{"input_tokens":23,"object":"response.input_tokens"}'


async def test_thinking_and_schema_reach_the_service(
    client: httpx.AsyncClient, service: FakeService
):
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {}}}}
    await chat(
        client,
        USER,
        thinking_budget_tokens=6,
        reasoning_budget_message="Enough.",
        response_format={"type": "json_object", "schema": schema},
    )
    asked = service.calls[-1].request
    assert (asked.reasoning.budget_tokens, asked.reasoning.budget_message) == (6, "Enough.")
    assert json.loads(asked.json_schema) == schema
    assert asked.lenient_schema


async def test_continued_reasoning_is_part_of_the_answer(
    client: httpx.AsyncClient, service: FakeService
):
    service.script = message_script(
        generation_pb2.ChatDelta(reasoning=", so"), generation_pb2.ChatDelta(content="Yes.")
    )
    held = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    answer = await chat(client, USER, held)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, so", "Yes.")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"chat_template_kwargs":', b""),
        (b'"response_format":{"type":"json_schema","json_schema":{"schema":', b"}}"),
        (
            b'"tool_choice":"none","tools":[{"type":"function","function":{"name":"f","parameters":',
            b"}}]",
        ),
    ],
)
async def test_what_is_too_deep_to_be_passed_on_is_no_bug(
    client: httpx.AsyncClient, before: bytes, after: bytes
):
    deep = b'{"a":' * 600 + b"1" + b"}" * 600
    body = b'{"messages":[{"role":"user","content":"Hi"}],' + before + deep + after + b"}"
    response = await client.post("/v1/chat/completions", content=body)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "parse error: the value is nested too deeply"


def message_script(*deltas: generation_pb2.ChatDelta) -> Any:
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        for count, delta in enumerate(deltas, start=1):
            yield chunk("x", 5, count, chat_deltas=[delta])
        yield finished(call, len(deltas), finish_reason=generation_pb2.FINISH_REASON_EOS)

    return script


def calling(index: int, name: str = "", arguments: str = "") -> generation_pb2.ChatDelta:
    piece = generation_pb2.ToolCallDelta(index=index, name=name, arguments_json=arguments)
    return generation_pb2.ChatDelta(tool_call=piece)


SAYS = message_script(
    generation_pb2.ChatDelta(reasoning="hm"),
    generation_pb2.ChatDelta(content="Look:"),
    calling(0, "weather", "{"),
    calling(0, arguments="}"),
)


async def test_a_whole_answer_has_reasoning_content_and_calls(
    client: httpx.AsyncClient, service: FakeService
):
    service.script = SAYS
    answer = await chat(client, USER, tools=[TOOL])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert list(message) == ["role", "content", "reasoning_content", "tool_calls"]
    assert (message["content"], message["reasoning_content"]) == ("Look:", "hm")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": "{}"}
    assert list(call) == ["type", "function", "id"]
    assert len(call["id"]) == 32


async def test_a_stream_tells_the_same_in_pieces(client: httpx.AsyncClient, service: FakeService):
    service.script = SAYS
    events = await chat(client, USER, tools=[TOOL], stream=True)
    deltas = content(events)
    assert deltas[:3] == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "hm"},
        {"content": "Look:"},
    ]
    first, second = (delta["tool_calls"][0] for delta in deltas[3:5])
    assert first | {"id": ""} == {
        "index": 0,
        "id": "",
        "type": "function",
        "function": {"name": "weather", "arguments": "{"},
    }
    assert second == {"index": 0, "function": {"arguments": "}"}}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_service_is_asked_for_a_message_with_its_tools(
    client: httpx.AsyncClient, service: FakeService
):
    await chat(client, USER, tools=[TOOL], tool_choice="required", reasoning_format="none")
    request = service.calls[0].request
    assert [tool.name for tool in request.chat.tools] == ["weather"]
    assert request.chat.tool_choice == common_pb2.TOOL_CHOICE_REQUIRED
    assert request.reasoning.format == generation_pb2.REASONING_FORMAT_NONE
