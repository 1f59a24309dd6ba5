"""What an answer says, read from its whole and from the events of its stream, in one form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tests.streams.cases import CHAT, COMPLETION, MESSAGES, RESPONSES, TEXT

Json = dict[str, Any]


@dataclass
class Said:
    """One sample's text of every kind, and why it ended ("" where the API does not say).

    Calls are (name, arguments as text); Anthropic's whole has parsed arguments, so there they are
    what the text means, and {} if it is cut off.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list[list[str]])
    reason: str = ""

    def call(self, index: int, name: str, arguments: str) -> None:
        """Adds to a call, which begins with its first piece."""
        if index == len(self.calls):
            self.calls.append(["", ""])
        self.calls[index][0] += name
        self.calls[index][1] += arguments


Samples = dict[int, Said]


def of_whole(route: str, answer: Any) -> Samples:
    """Reads an answer in one piece."""
    return _WHOLE[route](answer)


def of_stream(route: str, events: Sequence[Any]) -> Samples:
    """Reads the `data` of all events."""
    return _STREAM[route](events)


def _native_whole(answer: Any) -> Samples:
    results = cast("list[Json]", answer if isinstance(answer, list) else [answer])
    return {r["index"]: Said(r["content"], reason=r["stop_type"]) for r in results}


def _native_stream(events: Sequence[Any]) -> Samples:
    said: Samples = {}
    for event in events:
        if event is None:
            continue
        one = said.setdefault(event["index"], Said())
        one.content += event["content"]
        if event["stop"]:
            one.reason = event["stop_type"]
    return said


def _text_whole(answer: Json) -> Samples:
    return {c["index"]: Said(c["text"], reason=c["finish_reason"]) for c in answer["choices"]}


def _text_stream(events: Sequence[Any]) -> Samples:
    said: Samples = {}
    for choice in _choices(events):
        one = said.setdefault(choice["index"], Said())
        one.content += choice["text"]
        one.reason += choice["finish_reason"] or ""
    return said


def _chat_whole(answer: Json) -> Samples:
    said: Samples = {}
    for choice in answer["choices"]:
        message = choice["message"]
        one = Said(message["content"], message.get("reasoning_content", ""))
        for index, call in enumerate(message.get("tool_calls", ())):
            one.call(index, call["function"]["name"], call["function"]["arguments"])
        one.reason = choice["finish_reason"]
        said[choice["index"]] = one
    return said


def _chat_stream(events: Sequence[Any]) -> Samples:
    said: Samples = {}
    for choice in _choices(events):
        one, delta = said.setdefault(choice["index"], Said()), choice["delta"]
        one.content += delta.get("content") or ""
        one.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            told = call["function"]
            one.call(call["index"], told.get("name", ""), told.get("arguments", ""))
        one.reason += choice["finish_reason"] or ""
    return said


def _choices(events: Iterable[Any]) -> Iterable[Json]:
    for event in events:
        yield from event["choices"] if event is not None else ()


def _items(output: Iterable[Json]) -> Said:
    said = Said()
    for item in output:
        match item["type"]:
            case "reasoning":
                said.reasoning += item["content"][0]["text"]
            case "message":
                said.content += item["content"][0]["text"]
            case _:
                said.call(len(said.calls), item["name"], item["arguments"])
    return said


def _responses_whole(answer: Json) -> Samples:
    return {0: _items(answer["output"])}


def _responses_stream(events: Sequence[Any]) -> Samples:
    said = Said()
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                said.content += event["delta"]
            case "response.reasoning_text.delta":
                said.reasoning += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                said.call(len(said.calls), event["item"]["name"], "")
            case "response.function_call_arguments.delta":
                said.call(len(said.calls) - 1, "", event["delta"])
            case _:
                pass
    # What is repeated at the end is the same once more.
    assert _items(events[-1]["response"]["output"]) == said
    return {0: said}


def _messages_whole(answer: Json) -> Samples:
    said = Said(reason=answer["stop_reason"])
    for block in answer["content"]:
        match block["type"]:
            case "thinking":
                said.reasoning += block["thinking"]
            case "text":
                said.content += block["text"]
            case _:
                said.call(len(said.calls), block["name"], json.dumps(block["input"]))
    return {0: said}


def _messages_stream(events: Sequence[Any]) -> Samples:
    said, calls = Said(), dict[int, int]()
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = len(said.calls)
                said.call(len(said.calls), event["content_block"]["name"], "")
            case "content_block_delta":
                delta = event["delta"]
                said.reasoning += delta.get("thinking", "")
                said.content += delta.get("text", "")
                if "partial_json" in delta:
                    said.call(calls[event["index"]], "", delta["partial_json"])
            case "message_delta":
                said.reason = event["delta"]["stop_reason"]
            case _:
                pass
    for call in said.calls:
        call[1] = _meant(call[1])
    return {0: said}


def _meant(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments))
    except ValueError:
        return "{}"


_WHOLE: Mapping[str, Callable[[Any], Samples]] = {
    COMPLETION: _native_whole,
    TEXT: _text_whole,
    CHAT: _chat_whole,
    RESPONSES: _responses_whole,
    MESSAGES: _messages_whole,
}
_STREAM: Mapping[str, Callable[[Sequence[Any]], Samples]] = {
    COMPLETION: _native_stream,
    TEXT: _text_stream,
    CHAT: _chat_stream,
    RESPONSES: _responses_stream,
    MESSAGES: _messages_stream,
}
