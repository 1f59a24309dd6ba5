"""A conversation in the shape that a template understands. Pure functions over JSON-like values.

Messages are mappings as OpenAI's API has them: `role`, `content` (text, a list of
`{"type": "text", "text": ...}` parts, or None), and for turns with tools or thinking
`reasoning_content`, `name`, `tool_call_id` and `tool_calls`. Knows no engine of templates.

Source: llama.cpp `common_chat_templates_apply` and the workarounds that it applies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine.errors import InvalidField
from engine.text.message_quirks import apply_quirks

Message = Mapping[str, Any]

# Harmony templates tell a developer from a system message; all others know only the latter.
_HARMONY_MARK = "<|channel|>"


@dataclass(frozen=True)
class TemplateCaps:
    """What a template can render; the names are those of `chat_template_caps` in `/props`.

    At least one of the two kinds of content is supported by every sane template.
    """

    supports_object_arguments: bool = False
    supports_parallel_tool_calls: bool = True
    supports_preserve_reasoning: bool = False
    supports_reasoning_effort: bool = False
    supports_string_content: bool = True
    supports_system_role: bool = True
    supports_tool_calls: bool = True
    supports_tools: bool = True
    supports_typed_content: bool = False


def shape_messages(
    messages: Sequence[Message], caps: TemplateCaps, source: str
) -> list[dict[str, Any]]:
    """Returns the messages as the template with these capabilities and source expects them.

    Raises:
        InvalidField: a message cannot be put in that shape; names its position.
    """
    shaped = [_canonical(message) for message in messages]
    for message in shaped:
        message["content"] = _content(message["content"], caps)
    if _HARMONY_MARK not in source:
        for message in shaped:
            if message["role"] == "developer":
                message["role"] = "system"
    if not caps.supports_system_role:
        shaped = _without_system(shaped)
    if caps.supports_object_arguments:
        for position, message in enumerate(shaped):
            for call in message.get("tool_calls", ()):
                _parse_arguments(call["function"], f"messages[{position}].tool_calls")
    return apply_quirks(shaped, source)


def join_parts(parts: Iterable[Mapping[str, str]], delimiter: str) -> str:
    """Returns the text of a message's text parts as one; no delimiter comes first."""
    text = ""
    for part in parts:
        text += delimiter + part["text"] if text else part["text"]
    return text


def content_text(content: str | Iterable[Mapping[str, str]] | None) -> str:
    """Returns a message's content as one text; absent content is an empty one."""
    if content is None or isinstance(content, str):
        return content or ""
    return join_parts(content, "\n")


def _canonical(message: Message) -> dict[str, Any]:
    """The members that templates see, in llama.cpp's order (some templates print them all)."""
    shaped: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if message.get(name):
            shaped[name] = message[name]
    if message.get("tool_calls"):
        shaped["tool_calls"] = [_canonical_call(call) for call in message["tool_calls"]]
    return shaped


def _canonical_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    shaped: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": function["arguments"]},
    }
    if call.get("id"):
        shaped["id"] = call["id"]
    return shaped


def _content(content: str | list[Mapping[str, str]], caps: TemplateCaps) -> Any:
    only_text = caps.supports_string_content and not caps.supports_typed_content
    only_parts = caps.supports_typed_content and not caps.supports_string_content
    if only_text and not isinstance(content, str):
        return join_parts(content, "\n")
    if only_parts and isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Puts a leading system message in front of the next message's text."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if not rest:
        return []
    texts = [content_text(system["content"]), content_text(rest[0]["content"])]
    return [{**rest[0], "content": "\n".join(texts)}, *rest[1:]]


def _parse_arguments(function: dict[str, Any], field: str) -> None:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        return
    try:
        function["arguments"] = cast(object, json.loads(arguments))
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, f"the arguments of {function['name']!r} are not JSON") from error
