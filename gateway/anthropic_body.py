"""A body of `/v1/messages` as the chat body that says the same.

Source: server_chat_convert_anthropic_to_oai of llama-server, its leniency included: blocks of an
unknown type, and fields that it does not know, are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gateway import peer_json
from gateway.errors import server_fault
from gateway.fields import lenient_integer

_DEFAULT_MAX_TOKENS = 4096
_DEFAULT_BUDGET = 10000
_PASSED_ON = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")
_TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}
# A stamp that changes with every request of one client, which no prefix would survive.
_BILLING = "x-anthropic-billing-header:"
_STAMP = "cch="
_STAMP_CHARS = 5


def to_chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a body.

    Raises:
        ApiError: it has no messages.
    """
    if "messages" not in body:
        raise server_fault("'messages' is required")
    messages = _system(body.get("system"))
    for message in _list(body["messages"]):
        messages += _converted(_object(message), message)
    chat: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.get("max_tokens", _DEFAULT_MAX_TOKENS),
    }
    if isinstance(body.get("tools"), list):
        chat["tools"] = [_tool(_object(tool)) for tool in body["tools"]]
    choice = _TOOL_CHOICES.get(_text(_object(body.get("tool_choice")), "type"))
    if choice is not None:
        chat["tool_choice"] = choice
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    thinking = _object(body.get("thinking"))
    if thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = lenient_integer(
            thinking.get("budget_tokens"), _DEFAULT_BUDGET
        )
    return chat | {name: body[name] for name in _PASSED_ON if name in body}


def _system(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):
        content = _without_stamp(value)
    else:
        blocks = [_object(block) for block in _list(value)]
        texts = [_text(block, "text") for block in blocks if block.get("type") == "text"]
        content = "".join(_without_stamp(text) for text in texts)
    return [{"role": "system", "content": content}]


def _without_stamp(text: str) -> str:
    start = text.find(_STAMP, len(_BILLING)) if text.startswith(_BILLING) else -1
    end = start + len(_STAMP) + _STAMP_CHARS
    if start < 0 or text[end : end + 1] != ";":
        return text
    return text[: start + len(_STAMP)] + "f" * _STAMP_CHARS + text[end:]


def _converted(message: Mapping[str, Any], original: Any) -> list[Any]:
    """The chat messages of one message: results of tools are messages of their own."""
    if "content" not in message:
        return [] if message.get("role") == "assistant" else [original]
    if not isinstance(message["content"], list):
        return [original]
    blocks = [_object(block) for block in cast("list[Any]", message["content"])]
    said = _said(_text(message, "role"), blocks)
    results = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    return [*said, *results]


def _said(role: str, blocks: Sequence[Mapping[str, Any]]) -> list[Any]:
    content = _parts(blocks)
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    reasoning = "".join(_text(b, "thinking") for b in blocks if b.get("type") == "thinking")
    if not (content or calls or reasoning):
        return []
    message: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return [message]


def _parts(blocks: Sequence[Mapping[str, Any]]) -> list[Any]:
    parts: list[Any] = []
    for block in blocks:
        if block.get("type") == "text":
            parts.append(block)
        elif block.get("type") == "image":
            parts += _image(block)
    return parts


def _image(block: Mapping[str, Any]) -> list[Any]:
    source = _object(block.get("source"))
    match source.get("type"):
        case "base64":
            media = _text(source, "media_type", "image/jpeg")
            url = f"data:{media};base64,{_text(source, 'data')}"
        case "url":
            url = _text(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    written = peer_json.write({} if arguments is None else arguments).decode()
    function = {"name": _text(block, "name"), "arguments": written}
    return {"id": _text(block, "id"), "type": "function", "function": function}


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        given = [_object(part) for part in cast("list[Any]", content)]
        parts = _parts([{"type": "text", "text": _text(p, "text")} if p.get("type") == "text" else p
                        for p in given])  # fmt: skip
        has_image = any(part["type"] == "image_url" for part in parts)
        content = parts if has_image else "".join(part["text"] for part in parts)
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id"), "content": content}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": _text(tool, "name"),
        "description": _text(tool, "description"),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _object(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _text(members: Mapping[str, Any], name: str, default: str = "") -> str:
    value = members.get(name)
    return value if isinstance(value, str) else default
