"""The messages and tools of a chat body, as the service takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvarts.v1 import common_pb2

from gateway import peer_json
from gateway.errors import invalid, server_fault, wrong_type
from gateway.fields import members_of

_MEDIA = {
    "image_url": "image",
    "input_audio": "audio",
    "input_video": "video",
    "video_url": "video",
}


def check_messages(body: Mapping[str, Any]) -> None:
    """Checks the shape of `messages` and of their contents.

    Raises:
        ApiError: 400, or 500 for media, in the peer's words.
    """
    if "messages" not in body:
        raise invalid("'messages' is required")
    if not isinstance(body["messages"], list):
        raise invalid("Expected 'messages' to be an array")
    for item in cast("list[Any]", body["messages"]):
        _check_message(members_of(item))


def read_messages(items: Sequence[Any]) -> list[common_pb2.ChatMessage]:
    """Converts checked messages.

    Raises:
        ApiError: 500 for what the peer's second look finds: no role, a bad tool call.
    """
    try:
        return [_read_message(members_of(item)) for item in items]
    except _Malformed as error:
        raise server_fault(f"Failed to parse messages: {error}") from error


def read_tools(value: Any) -> list[common_pb2.Tool]:
    """Converts the tools; null and absent are none.

    Raises:
        ApiError: 500 for every malformed one, as the peer answers.
    """
    if value is None:
        return []
    try:
        if not isinstance(value, list):
            raise _Malformed(f"Expected 'tools' to be an array, got {_text(value)}")
        return [_read_tool(members_of(item)) for item in cast("list[Any]", value)]
    except _Malformed as error:
        raise server_fault(f"Failed to parse tools: {error}; tools = {_text(value)}") from error


class _Malformed(ValueError):
    """A part of a message or tool that the peer cannot read."""


def _text(value: Any) -> str:
    return peer_json.write(value).decode()


def _check_message(message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role != "assistant" and "content" not in message:
        raise invalid("All non-assistant messages must contain 'content'")
    if "content" not in message:
        if "tool_calls" not in message:
            raise invalid("Assistant message must contain either 'content' or 'tool_calls'!")
        return
    content = message["content"]
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid("Expected 'content' to be a string or an array")
    for part in cast("list[Any]", content):
        _check_part(members_of(part))


def _check_part(part: Mapping[str, Any]) -> None:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MEDIA:
        raise server_fault(
            f"{_MEDIA[kind]} input is not supported - hint: if this is unexpected, you may need to "
            "provide the mmproj"
        )
    if kind != "text":
        raise invalid("unsupported content[].type")


def _read_message(message: Mapping[str, Any]) -> common_pb2.ChatMessage:
    if "role" not in message:
        raise _Malformed(f"Missing 'role' in message: {_text(message)}")
    result = common_pb2.ChatMessage(
        role=_string(message["role"]),
        tool_calls=[_read_call(members_of(call)) for call in _list(message.get("tool_calls"))],
        tool_call_id=_string(message.get("tool_call_id", "")),
        name=_string(message.get("name", "")),
    )
    if "reasoning_content" in message:
        result.reasoning = _string(message["reasoning_content"])
    content = message.get("content")
    if isinstance(content, str):
        result.content = content
    elif isinstance(content, list):
        parts = [_read_part(members_of(part)) for part in cast("list[Any]", content)]
        result.parts.CopyFrom(common_pb2.ContentParts(parts=parts))
    elif not result.tool_calls:
        # null beside nothing else reads as an empty text.
        result.content = ""
    return result


def _read_part(part: Mapping[str, Any]) -> common_pb2.ContentPart:
    if "text" not in part:
        raise _Malformed("key 'text' not found")
    return common_pb2.ContentPart(text=_string(part["text"]))


def _read_call(call: Mapping[str, Any]) -> common_pb2.ToolCall:
    if call.get("type") != "function":
        problem = "Unsupported tool call type" if "type" in call else "Missing tool call type"
        raise _Malformed(f"{problem}: {_text(call)}")
    function = members_of(call.get("function"))
    if "name" not in function:
        raise _Malformed(f"Missing tool call name: {_text(call)}")
    if "arguments" not in function:
        raise _Malformed("key 'arguments' not found")
    arguments = function["arguments"]
    return common_pb2.ToolCall(
        id=_string(call.get("id", "")),
        name=_string(function["name"]),
        arguments_json=arguments if isinstance(arguments, str) else _text(arguments),
    )


def _read_tool(tool: Mapping[str, Any]) -> common_pb2.Tool:
    if tool.get("type") != "function":
        problem = "Unsupported tool type" if "type" in tool else "Missing tool type"
        raise _Malformed(f"{problem}: {_text(tool)}")
    function = members_of(tool.get("function"))
    if "name" not in function:
        raise _Malformed(f"Missing tool function: {_text(tool)}")
    return common_pb2.Tool(
        name=_string(function["name"]),
        description=_string(function.get("description", "")),
        parameters_json=_text(function.get("parameters", {})),
    )


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise _Malformed(wrong_type("string", value))
    return value
