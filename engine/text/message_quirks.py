"""What single families of templates want of a conversation beyond their capabilities: one row each.

Messages are in the shape that `engine.text.messages` gives them, and are changed in place or put anew.

Source: the workarounds of llama.cpp's parsers of single families.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Quirk:
    """A change to the messages for templates with all of `marks` and none of `without`."""

    marks: tuple[str, ...]
    change: Callable[[Messages], Messages]
    without: tuple[str, ...] = ()

    def fits(self, source: str) -> bool:
        """Says whether a template wants the change."""
        has_all = all(mark in source for mark in self.marks)
        return has_all and not any(mark in source for mark in self.without)


def apply_quirks(messages: Messages, source: str) -> Messages:
    """Returns the messages as a template wants them."""
    for quirk in _QUIRKS:
        if quirk.fits(source):
            messages = quirk.change(messages)
    return messages


def _trimmed(messages: Messages) -> Messages:
    for message in messages:
        for name in ("content", "reasoning_content"):
            if isinstance(message.get(name), str):
                message[name] = message[name].strip()
        if isinstance(message["content"], list):
            parts = cast("list[dict[str, Any]]", message["content"])
            message["content"] = [{**part, "text": part["text"].strip()} for part in parts]
    return messages


def _with_thinking(messages: Messages) -> Messages:
    for message in messages:
        if message.get("reasoning_content"):
            message["thinking"] = message["reasoning_content"]
    return messages


def _with_thinking_or_content(messages: Messages) -> Messages:
    """A message that thinks and calls has no content."""
    for message in _with_thinking(messages):
        if message.get("thinking") and message.get("tool_calls"):
            del message["content"]
    return messages


def _in_blocks(messages: Messages) -> Messages:
    """What system and assistant say is a list of blocks, thoughts first."""
    for message in messages:
        if message["role"] not in ("system", "assistant"):
            continue
        blocks: list[Any] = []
        reasoning = message.pop("reasoning_content", None)
        if reasoning:
            blocks.append({"type": "thinking", "thinking": reasoning})
        content = message["content"]
        blocks += content if isinstance(content, list) else [{"type": "text", "text": content}]
        message["content"] = blocks
    return messages


def _in_call_order(messages: Messages) -> Messages:
    """Results of tools stand in the order of their calls, as far as users' words go between them."""
    order: dict[str, int] = {}
    places: list[int] = []

    def sort() -> None:
        results = sorted(
            (messages[at] for at in places),
            key=lambda message: order.get(message.get("tool_call_id", ""), 0),
        )
        for at, result in zip(places, results, strict=True):
            messages[at] = result
        places.clear()

    for at, message in enumerate(messages):
        if message["role"] == "tool" and order:
            places.append(at)
        elif message["role"] not in ("user", "tool"):
            sort()
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = cast("Sequence[dict[str, Any]]", message["tool_calls"])
            order = {call["id"]: i for i, call in enumerate(calls) if call.get("id")}
    sort()
    return messages


def _with_responses(messages: Messages) -> Messages:
    """A message with calls holds their results, and the answer to them."""
    shaped: Messages = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message["role"] != "assistant" or not message.get("tool_calls"):
            shaped.append(message)
            continue
        turn = {"role": "assistant", "tool_calls": message["tool_calls"]}
        responses: list[dict[str, Any]] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            responses.append(_response(messages[at], message["tool_calls"], len(responses)))
            at += 1
        if responses:
            turn["tool_responses"] = responses
        if at < len(messages) and _is_answer(messages[at]):
            turn["content"] = messages[at]["content"]
            at += 1
        if message.get("reasoning_content"):
            turn["reasoning_content"] = message["reasoning_content"]
        shaped.append(turn)
    return shaped


def _response(
    message: dict[str, Any], calls: Sequence[dict[str, Any]], index: int
) -> dict[str, Any]:
    response = message["content"]
    if isinstance(response, str):
        try:
            response = json.loads(response)
        except (ValueError, RecursionError):
            response = message["content"]
    name = calls[index]["function"]["name"] if index < len(calls) else ""
    return {"name": name or message.get("tool_call_id", ""), "response": response}


def _is_answer(message: dict[str, Any]) -> bool:
    is_said = message["role"] == "assistant" and bool(message["content"])
    return is_said and not message.get("tool_calls")


_QUIRKS = (
    Quirk(
        ("You have access to the following functions in JSONSchema format",),
        _trimmed,
    ),
    Quirk(("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]"), _in_blocks, without=("[CALL_ID]",)),
    Quirk(("<|channel|>",), _with_thinking_or_content),
    Quirk(("<|tool_list_start|>", "<|tool_list_end|>"), _with_thinking),
    Quirk(("List of tools: [",), _with_thinking, without=("<|tool_list_start|>",)),
    Quirk(("dsml_token", "DSML", "tool_calls"), _in_call_order, without=("function_calls",)),
    Quirk(("'<|tool_call>call:'",), _with_responses, without=("{#- OpenAI Chat Completions:",)),
)
