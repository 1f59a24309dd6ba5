"""A chat body: its checks in the peer's order, its conversation, and what is left for completion.

What the peer parses leniently is lenient here; what it answers with 500 instead of 400 stays so.
This module makes no call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvarts.v1 import common_pb2, generation_pb2

from gateway import peer_json
from gateway.chat_messages import check_messages, read_messages, read_tools
from gateway.errors import invalid, server_fault, wrong_type
from gateway.fields import lenient_flag, lenient_integer, members_of
from gateway.schema import REASONING_FORMATS

ChatDelta = generation_pb2.ChatDelta

_TOOL_CHOICES = {
    "auto": common_pb2.TOOL_CHOICE_AUTO,
    "none": common_pb2.TOOL_CHOICE_NONE,
    "required": common_pb2.TOOL_CHOICE_REQUIRED,
}
_CONTINUATIONS = {
    "content": common_pb2.FINAL_MESSAGE_CONTINUED_CONTENT,
    "reasoning_content": common_pb2.FINAL_MESSAGE_CONTINUED_REASONING,
}
_DEFAULT_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class ChatServer:
    """How the server was started, as far as chat depends on it."""

    use_jinja: bool
    prefill_assistant: bool
    template_kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class ChatBody:
    """A checked body. `fields` are those of the completion, without its prompt.

    `prefill` is what a last message holds that is continued; `is_prefill_echoed` says whether
    a stream repeats it.
    """

    chat: common_pb2.ChatPrompt
    fields: dict[str, Any]
    prefill: tuple[ChatDelta, ...]
    is_prefill_echoed: bool


def read_chat_body(body: Any, server: ChatServer) -> ChatBody:
    """Reads a chat body.

    Raises:
        ApiError: it is refused.
    """
    members = members_of(body)
    tool_choice = _lenient_text(members.get("tool_choice"), "auto")
    has_tools = isinstance(members.get("tools"), list) and bool(members["tools"])
    if not server.use_jinja:
        _check_without_jinja(has_tools=has_tools, tool_choice=tool_choice)
    schema = _read_schema(members)
    check_messages(members)
    chat = common_pb2.ChatPrompt(
        messages=read_messages(members["messages"]),
        tools=read_tools(members.get("tools")),
        tool_choice=_read_tool_choice(tool_choice),
    )
    if isinstance(members.get("parallel_tool_calls"), bool):
        chat.parallel_tool_calls = members["parallel_tool_calls"]
    prefill, is_explicit = _read_final_message(members, chat, server)
    _check_reasoning_format(members)
    _check_tools(members, chat)
    _read_template_kwargs(members, chat, server)
    fields = dict(members)
    if schema is not None:
        fields["json_schema"] = schema
    fields["reasoning_budget_tokens"] = _read_budget(members)
    fields |= _read_logprobs(members, has_tools=has_tools)
    is_echoed = not is_explicit or lenient_flag(members.get("echo"), False)
    return ChatBody(chat, fields, prefill, is_echoed)


def without_generation_prompt(chat: common_pb2.ChatPrompt) -> common_pb2.ChatPrompt:
    """The conversation as it stands before the turn that is generated."""
    before = common_pb2.ChatPrompt()
    before.CopyFrom(chat)
    if before.final_message != common_pb2.FINAL_MESSAGE_CLOSED and before.messages:
        del before.messages[-1]
    before.final_message = common_pb2.FINAL_MESSAGE_CLOSED
    before.add_generation_prompt = False
    return before


def _lenient_text(value: Any, default: str) -> str:
    return value if isinstance(value, str) else default


def _check_without_jinja(*, has_tools: bool, tool_choice: str) -> None:
    if has_tools:
        raise server_fault("tools param requires --jinja flag")
    if tool_choice != "auto":
        raise server_fault("tool_choice param requires --jinja flag")


def _read_schema(body: Mapping[str, Any]) -> Any:
    """The JSON schema that `json_schema` or `response_format` asks for; None for none."""
    schema = body.get("json_schema")
    if schema is not None and _lenient_text(body.get("grammar"), ""):
        raise server_fault("Cannot use both json_schema and grammar")
    wanted = body.get("response_format")
    if isinstance(wanted, Mapping):
        schema = _read_response_format(cast("Mapping[str, Any]", wanted), schema)
    return {"type": "object"} if schema == {} else schema


def _read_response_format(wanted: Mapping[str, Any], schema: Any) -> Any:
    kind = _lenient_text(wanted.get("type"), "")
    if kind == "json_object":
        return _object_at(wanted, "schema") if "schema" in wanted or not schema else schema
    if kind == "json_schema":
        return _object_at(_object_at(wanted, "json_schema"), "schema")
    if kind not in ("", "text"):
        raise invalid(
            f'response_format type must be one of "text" or "json_object", but got: {kind}'
        )
    return schema


def _object_at(value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        return {}
    found = cast("Mapping[str, Any]", value).get(key)
    return {} if found is None else found


def _read_tool_choice(name: str) -> common_pb2.ToolChoice.ValueType:
    if name not in _TOOL_CHOICES:
        raise invalid(f"Invalid tool_choice: {name}")
    return _TOOL_CHOICES[name]


def _read_final_message(
    body: Mapping[str, Any], chat: common_pb2.ChatPrompt, server: ChatServer
) -> tuple[tuple[ChatDelta, ...], bool]:
    """Sets what becomes of the last message; returns what it holds and whether that was asked."""
    generates = lenient_flag(body.get("add_generation_prompt"), True)
    asked = _read_continuation(body.get("continue_final_message"))
    roles = [message.role for message in chat.messages]
    final = asked
    if asked is None and server.prefill_assistant and roles[-1:] == ["assistant"]:
        if roles[-2:] == ["assistant", "assistant"]:
            raise invalid("Cannot have 2 or more assistant messages at the end of the list.")
        final, generates = common_pb2.FINAL_MESSAGE_CONTINUED, False
    if final is not None and generates:
        raise invalid("Cannot set both add_generation_prompt and continue_final_message to true.")
    if final is not None and roles[-1:] == ["assistant"] and chat.messages[-1].tool_calls:
        raise invalid("Cannot continue an assistant message that contains tool calls.")
    chat.add_generation_prompt = generates
    # The built-in formats without Jinja close every turn.
    if final is None or not server.use_jinja:
        chat.final_message = common_pb2.FINAL_MESSAGE_CLOSED
        return (), asked is not None
    chat.final_message = final
    return _held(chat), asked is not None


def _read_continuation(value: Any) -> common_pb2.FinalMessage.ValueType | None:
    if value is True:
        return common_pb2.FINAL_MESSAGE_CONTINUED
    return _CONTINUATIONS.get(value) if isinstance(value, str) else None


def _held(chat: common_pb2.ChatPrompt) -> tuple[ChatDelta, ...]:
    """What the open last message holds: its reasoning, and its content unless that is to come."""
    if not chat.messages:
        return ()
    message = chat.messages[-1]
    reasoning = (ChatDelta(reasoning=message.reasoning),) if message.reasoning else ()
    content = message.content or "\n\n".join(part.text for part in message.parts.parts)
    if not content or chat.final_message == common_pb2.FINAL_MESSAGE_CONTINUED_REASONING:
        return reasoning
    return (*reasoning, ChatDelta(content=content))


def _check_reasoning_format(body: Mapping[str, Any]) -> None:
    if "reasoning_format" not in body:
        return
    name = body["reasoning_format"]
    if not isinstance(name, str):
        raise server_fault(wrong_type("string", name))
    if name not in REASONING_FORMATS:
        raise server_fault(f"Unknown reasoning format: {name}")


def _check_tools(body: Mapping[str, Any], chat: common_pb2.ChatPrompt) -> None:
    if not chat.tools or chat.tool_choice == common_pb2.TOOL_CHOICE_NONE:
        return
    if "grammar" in body:
        raise invalid("Cannot use custom grammar constraints with tools.")
    if lenient_flag(body.get("logprobs"), False) and lenient_flag(body.get("stream"), False):
        raise invalid("logprobs is not supported with tools + stream")


def _read_template_kwargs(
    body: Mapping[str, Any], chat: common_pb2.ChatPrompt, server: ChatServer
) -> None:
    kwargs = dict(server.template_kwargs)
    given = body.get("chat_template_kwargs")
    if isinstance(given, Mapping):
        kwargs |= cast("Mapping[str, Any]", given)
    if isinstance(kwargs.get("enable_thinking"), str):
        raise invalid('invalid type for "enable_thinking" (expected boolean, got string)')
    effort = _lenient_text(body.get("reasoning_effort"), "")
    if effort:
        chat.reasoning_effort = effort
    if kwargs:
        chat.template_kwargs_json = peer_json.write(kwargs).decode()


def _read_budget(body: Mapping[str, Any]) -> int:
    """The limit of thinking by either of its names; -1 is the server's."""
    other = lenient_integer(body.get("thinking_budget_tokens"), -1)
    return lenient_integer(body.get("reasoning_budget_tokens"), other)


def _read_logprobs(body: Mapping[str, Any], *, has_tools: bool) -> dict[str, Any]:
    if lenient_flag(body.get("logprobs"), False):
        if has_tools and lenient_flag(body.get("stream"), False):
            raise invalid("logprobs is not supported with tools + stream")
        return {"n_probs": lenient_integer(body.get("top_logprobs"), _DEFAULT_TOP_LOGPROBS)}
    if body.get("top_logprobs") is not None:
        raise invalid("top_logprobs requires logprobs to be set to true")
    return {}
