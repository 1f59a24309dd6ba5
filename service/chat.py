"""A conversation as a prompt: messages to what a chat template takes, and the rendered text.

The template itself is the engine's. Parsing an answer back into reasoning and tool calls is not
here.

Source: the template variables of llama.cpp's chat layer (contract 2.5), which follow OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvarts.v1 import common_pb2

from engine.errors import InvalidField, NotSupported
from engine.text.chat_format import PLAIN, ChatFormat, ReasoningTags
from service.defaults import GenerationDefaults
from service.json_text import json_object
from service.loaded import Template
from service.open_turn import OpenTurn, open_turn


@dataclass(frozen=True)
class RenderedChat:
    """The prompt's text, and what of the answer the conversation already held.

    Attributes:
        text: The prompt.
        echo: The content that a continued message held and that the answer repeats, or "".
        echoed_reasoning: Its reasoning likewise.
        thinking: The end of `text` from the tag on that opened reasoning which is still open; ""
            where none is.
        opening: What the prompt already holds of the message that is to be read.
        is_continued: The turn goes on where a message of the conversation ended.
    """

    text: str
    echo: str = ""
    echoed_reasoning: str = ""
    thinking: str = ""
    opening: str = ""
    is_continued: bool = False


def render_chat(
    chat: common_pb2.ChatPrompt,
    template: Template | None,
    defaults: GenerationDefaults,
    field: str,
    chat_format: ChatFormat = PLAIN,
) -> RenderedChat:
    """Renders a conversation; a trailing assistant message may stay open.

    Args:
        chat: a conversation whose shape was checked.
        template: the model's; None cannot chat.
        defaults: the server's.
        field: name of `chat` in its request, for messages.
        chat_format: how the model's family writes a message.

    Raises:
        InvalidField: JSON text that is no object, or messages that the template refuses.
        NotSupported: No template, or reasoning that a model without any is to continue.
        engine.errors.TemplateError: The template fails.
    """
    if template is None:
        raise NotSupported("chat (the model has no chat template)")
    messages = [
        _message(message, f"{field}.messages[{i}]") for i, message in enumerate(chat.messages)
    ]
    reasoning = chat_format.reasoning
    held = open_turn(chat, reasoning, field) if _is_continued(chat, defaults) else None
    tools, extra = _tools(chat, field), _kwargs(chat, defaults, field)
    shown = messages if held is None else messages[:-1]
    text = template.render(
        shown, tools=tools, add_generation_prompt=_opens_turn(chat, held), extra=extra
    )
    if held is None:
        opening = _opening(text, text, chat_format) or _thought(text, reasoning)
        return RenderedChat(text, thinking=_thinking(text, reasoning), opening=opening)
    opening_at = len(text)
    if reasoning is not None:
        closed = template.render(shown, tools=tools, add_generation_prompt=False, extra=extra)
        opening_at = len(closed) if text.startswith(closed) else opening_at
    thinking = ""
    if reasoning is not None and held.is_thinking:
        thinking = f"{reasoning.start}{reasoning.start_gap}{held.reasoning}"
    whole = held.behind(text, opening_at, chat_format)
    return RenderedChat(
        whole,
        echo=held.content if chat.echo_final_message else "",
        echoed_reasoning=held.reasoning if chat.echo_final_message else "",
        thinking=thinking,
        opening=_opening(text, whole, chat_format) or held.text(chat_format),
        is_continued=True,
    )


def _opening(prompt: str, whole: str, chat_format: ChatFormat) -> str:
    """What is behind the mark that a turn begins with, in a prompt and in what goes on from it."""
    if not chat_format.turn_start:
        return ""
    at = prompt.rfind(chat_format.turn_start)
    return chat_format.header + (whole[at + len(chat_format.turn_start) :] if at >= 0 else "")


def _thought(text: str, reasoning: ReasoningTags | None) -> str:
    """The reasoning at the end of a prompt that the template has opened, and closed again maybe."""
    if reasoning is None or not reasoning.start:
        return ""
    rest = text.rstrip()
    rest = rest.removesuffix(reasoning.end).rstrip()
    return text[len(rest) - len(reasoning.start) :] if rest.endswith(reasoning.start) else ""


def _opens_turn(chat: common_pb2.ChatPrompt, held: OpenTurn | None) -> bool:
    if held is not None or not chat.HasField("add_generation_prompt"):
        return True
    return chat.add_generation_prompt


def _thinking(text: str, reasoning: ReasoningTags | None) -> str:
    """The end of a prompt that has opened reasoning, from its tag on."""
    if reasoning is None or not reasoning.start or not text.rstrip().endswith(reasoning.start):
        return ""
    return text[text.rindex(reasoning.start) :]


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
