"""A conversation as a prompt: messages to what a chat template takes, and the rendered text.

The template itself is the engine's. Parsing an answer back into reasoning and tool calls is not
here: an answer's whole text is its content.

Source: the template variables of llama.cpp's chat layer (contract 2.5), which follow OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarts.v1 import common_pb2

from engine.errors import InvalidField, NotSupported
from service.defaults import GenerationDefaults
from service.json_text import json_object
from service.loaded import Template


@dataclass(frozen=True)
class RenderedChat:
    """The prompt's text, and what of the answer the conversation already held (may be "")."""

    text: str
    echo: str


def render_chat(
    chat: common_pb2.ChatPrompt,
    template: Template | None,
    defaults: GenerationDefaults,
    field: str,
) -> RenderedChat:
    """Renders a conversation; a trailing assistant message may stay open.

    Args:
        chat: a conversation whose shape was checked.
        template: the model's; None cannot chat.
        defaults: the server's.
        field: name of `chat` in its request, for messages.

    Raises:
        InvalidField: JSON text that is no object, or messages that the template refuses.
        NotSupported: No template, or an open message that needs the answer's format.
        engine.errors.TemplateError: The template fails.
    """
    if template is None:
        raise NotSupported("chat (the model has no chat template)")
    messages = [
        _message(message, f"{field}.messages[{i}]") for i, message in enumerate(chat.messages)
    ]
    held = _open_content(chat, defaults, field)
    text = template.render(
        messages if held is None else messages[:-1],
        tools=_tools(chat, field),
        add_generation_prompt=_opens_turn(chat, held),
        extra=_kwargs(chat, defaults, field),
    )
    if held is None:
        return RenderedChat(text, echo="")
    return RenderedChat(text + held, echo=held if chat.echo_final_message else "")


def _opens_turn(chat: common_pb2.ChatPrompt, held: str | None) -> bool:
    if held is not None or not chat.HasField("add_generation_prompt"):
        return True
    return chat.add_generation_prompt


def _open_content(
    chat: common_pb2.ChatPrompt, defaults: GenerationDefaults, field: str
) -> str | None:
    """Returns what the open last message holds, or None if every turn is closed."""
    if not _is_continued(chat, defaults):
        return None
    name = f"{field}.messages[{len(chat.messages) - 1}]"
    if not chat.messages or chat.messages[-1].role != "assistant":
        raise InvalidField(
            f"{field}.final_message", "continues, but the last message is not the assistant's"
        )
    last = chat.messages[-1]
    if last.tool_calls:
        raise InvalidField(f"{name}.tool_calls", "a message with tool calls cannot be continued")
    if len(chat.messages) > 1 and chat.messages[-2].role == "assistant":
        raise InvalidField(f"{name}.role", "two assistant messages end the conversation")
    is_reasoning = chat.final_message == common_pb2.FINAL_MESSAGE_CONTINUED_REASONING
    if is_reasoning or last.HasField("reasoning"):
        raise NotSupported("continuing a message with reasoning")
    if last.WhichOneof("body") == "parts":
        return "\n\n".join(part.text for part in last.parts.parts)
    return last.content


def _is_continued(chat: common_pb2.ChatPrompt, defaults: GenerationDefaults) -> bool:
    if chat.final_message != common_pb2.FINAL_MESSAGE_UNSPECIFIED:
        return chat.final_message != common_pb2.FINAL_MESSAGE_CLOSED
    return (
        defaults.prefill_assistant and bool(chat.messages) and chat.messages[-1].role == "assistant"
    )


def _message(message: common_pb2.ChatMessage, field: str) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": message.role,
        "content": _content(message),
    }
    if message.HasField("reasoning"):
        shown["reasoning_content"] = message.reasoning
    if message.tool_calls:
        shown["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.name:
        shown["name"] = message.name
    return shown


def _content(message: common_pb2.ChatMessage) -> str | list[dict[str, str]] | None:
    match message.WhichOneof("body"):
        case "content":
            return message.content
        case "parts":
            return [{"type": "text", "text": part.text} for part in message.parts.parts]
        case _:
            return None


def _tool_call(call: common_pb2.ToolCall, field: str) -> dict[str, Any]:
    arguments = call.arguments_json or "{}"
    json_object(arguments, f"{field}.arguments_json")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _tools(chat: common_pb2.ChatPrompt, field: str) -> Sequence[Mapping[str, Any]] | None:
    if not chat.tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json_object(
                    tool.parameters_json or '{"type":"object"}',
                    f"{field}.tools[{i}].parameters_json",
                ),
            },
        }
        for i, tool in enumerate(chat.tools)
    ]


def _kwargs(
    chat: common_pb2.ChatPrompt, defaults: GenerationDefaults, field: str
) -> dict[str, Any]:
    kwargs = dict(defaults.template_kwargs)
    if chat.template_kwargs_json:
        name = f"{field}.template_kwargs_json"
        kwargs.update(json_object(chat.template_kwargs_json, name))
        if not isinstance(kwargs.get("enable_thinking", True), bool):
            raise InvalidField(name, "enable_thinking is not a boolean")
    if chat.HasField("reasoning_effort"):
        if chat.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
        else:
            kwargs["reasoning_effort"] = chat.reasoning_effort
    return kwargs
