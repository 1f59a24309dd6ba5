"""A body of `/v1/responses` as the chat body that says the same.

Source: server_chat_convert_responses_to_chatcmpl of llama-server; what it does not name passes
on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from gateway.errors import invalid

_CONVERTED = frozenset(
    {"input", "instructions", "tools", "max_output_tokens", "reasoning", "previous_response_id"}
)
_ASKING_ROLES = ("user", "system", "developer")

Item = dict[str, Any]
Messages = list[Item]


def to_chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a body.

    Raises:
        ApiError: the input is missing or has a part that is not understood.
    """
    if "input" not in body:
        raise invalid("'input' is required")
    if isinstance(body.get("previous_response_id"), str) and body["previous_response_id"]:
        raise invalid("llama.cpp does not support 'previous_response_id'.")
    chat = {name: value for name, value in body.items() if name not in _CONVERTED}
    messages: Messages = []
    if "instructions" in body:
        text = body["instructions"]
        messages.append({"role": "system", "content": text if isinstance(text, str) else ""})
    _add_input(messages, body["input"])
    chat["messages"] = messages
    tools = _tools(body["tools"]) if "tools" in body else []
    if tools:
        chat["tools"] = tools
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _add_input(messages: Messages, value: Any) -> None:
    if isinstance(value, str):
        messages.append({"role": "user", "content": value})
        return
    if not isinstance(value, list):
        raise invalid("'input' must be a string or array of objects")
    for given in cast("list[Any]", value):
        item = dict(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else {}
        if isinstance(item.get("content"), str):
            item["content"] = [{"text": item["content"], "type": "input_text"}]
        _add_for(item)(messages, item)


def _add_for(item: Item) -> Callable[[Messages, Item], None]:
    """How an item is added, by what it has."""
    kind, role = item.get("type"), item.get("role")
    if isinstance(item.get("content"), list) and role in _ASKING_ROLES:
        return _add_asked
    if role == "assistant" and kind == "message":
        return _add_answered
    if kind == "function_call" and _has_texts(item, "arguments", "call_id", "name"):
        return _add_call
    has_output = isinstance(item.get("output"), str | list)
    if kind == "function_call_output" and has_output and _has_texts(item, "call_id"):
        return _add_result
    if kind == "reasoning" and isinstance(item.get("summary"), list):
        return _add_reasoning
    raise invalid("Cannot determine type of 'item'")


def _add_asked(messages: Messages, item: Item) -> None:
    content = [_asked_part(_object(part)) for part in item["content"]]
    rest = {name: value for name, value in item.items() if name not in ("type", "status")}
    messages.append(rest | {"content": content})


def _asked_part(part: Mapping[str, Any]) -> Item:
    match part.get("type"):
        case "input_text":
            if "text" not in part:
                raise invalid("'Input text' requires 'text'")
            return {"text": part["text"], "type": "text"}
        case "input_image":
            return _image(part)
        case "input_file":
            raise invalid("'input_file' is not supported by llamacpp at this moment")
        case _:
            raise invalid("'type' must be one of 'input_text', 'input_image', or 'input_file'")


def _image(part: Mapping[str, Any]) -> Item:
    if "image_url" not in part:
        raise invalid("'image_url' is required")
    return {"image_url": {"url": part["image_url"]}, "type": "image_url"}


def _add_answered(messages: Messages, item: Item) -> None:
    given = item.get("content")
    parts = cast("list[Any]", given) if isinstance(given, list) else []
    content = [_answered_part(_object(part)) for part in parts]
    open_turn = _open_turn(messages)
    if open_turn is None:
        rest = {name: value for name, value in item.items() if name not in ("type", "status")}
        messages.append(rest | {"content": content})
        return
    held = open_turn.get("content")
    open_turn["content"] = [*(held if isinstance(held, list) else []), *content]


def _answered_part(part: Mapping[str, Any]) -> Item:
    kind = part.get("type")
    if kind in ("output_text", "input_text"):
        if not _has_texts(part, "text"):
            raise invalid("'Output text' requires 'text'")
        return {"text": part["text"], "type": "text"}
    if kind == "refusal":
        if not _has_texts(part, "refusal"):
            raise invalid("'Refusal' requires 'refusal'")
        return {"refusal": part["refusal"], "type": "refusal"}
    raise invalid("'type' must be one of 'output_text' or 'refusal'")


def _add_call(messages: Messages, item: Item) -> None:
    call = {
        "function": {"arguments": item["arguments"], "name": item["name"]},
        "id": item["call_id"],
        "type": "function",
    }
    open_turn = _open_turn(messages)
    if open_turn is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
        return
    held = open_turn.get("tool_calls")
    open_turn["tool_calls"] = [*(held if isinstance(held, list) else []), call]


def _add_result(messages: Messages, item: Item) -> None:
    output = item["output"]
    if isinstance(output, list):
        output = [_result_part(_object(part)) for part in cast("list[Any]", output)]
    messages.append({"content": output, "role": "tool", "tool_call_id": item["call_id"]})


def _result_part(part: Mapping[str, Any]) -> Item:
    if "type" not in part:
        raise invalid("Output of tool call missing 'type' field")
    match part["type"]:
        case "input_text":
            return {**part, "type": "text"}
        case "input_image":
            return {**part, **_image(part)}
        case _:
            raise invalid("Output of tool call should be 'Input text' or 'Input image'")


def _add_reasoning(messages: Messages, item: Item) -> None:
    content = item.get("content")
    if not isinstance(content, list):
        raise invalid("item['content'] is not an array")
    if not content:
        raise invalid("item['content'] is empty")
    first = _object(cast("list[Any]", content)[0])
    if not _has_texts(first, "text"):
        raise invalid("item['content']['text'] is not a string")
    open_turn = _open_turn(messages)
    if open_turn is None:
        open_turn = cast("Item", {"role": "assistant", "content": []})
        messages.append(open_turn)
    open_turn["reasoning_content"] = first["text"]


def _open_turn(messages: Messages) -> Item | None:
    """The assistant's turn that the next item of the assistant belongs to."""
    return messages[-1] if messages and messages[-1].get("role") == "assistant" else None


def _tools(value: Any) -> list[Item]:
    if not isinstance(value, list):
        raise invalid("'tools' must be an array of objects")
    tools = [_object(tool) for tool in cast("list[Any]", value)]
    # Tools of other types have no equivalent in chat: the peer leaves them out.
    return [
        {"type": "function", "function": {"strict": True, **_without_type(tool)}}
        for tool in tools
        if tool.get("type") == "function"
    ]


def _without_type(tool: Mapping[str, Any]) -> Item:
    return {name: value for name, value in tool.items() if name != "type"}


def _object(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _has_texts(members: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(members.get(name), str) for name in names)
