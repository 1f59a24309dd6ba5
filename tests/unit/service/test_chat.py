from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kvarts.v1 import common_pb2

from engine.errors import InvalidField, NotSupported
from engine.text.chat_families import FAMILIES
from engine.text.chat_format import ChatFormat, ReasoningTags
from service.chat import render_chat
from service.defaults import GenerationDefaults
from service.json_text import json_object
from service.reasoning_frame import framed


class Recorder:
    """A template that keeps what it was given."""

    def __init__(self) -> None:
        self.messages: Sequence[Mapping[str, Any]] = ()
        self.others: dict[str, Any] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        self.messages = messages
        self.others = {"tools": tools, "opens": add_generation_prompt, "extra": extra}
        return "TEXT:"


def message(role: str, content: str = "", **changes: Any) -> common_pb2.ChatMessage:
    return common_pb2.ChatMessage(role=role, content=content, **changes)


def render(*messages: common_pb2.ChatMessage, **changes: Any) -> tuple[str, str, Recorder]:
    template = Recorder()
    chat = common_pb2.ChatPrompt(messages=messages, **changes)
    rendered = render_chat(chat, template, GenerationDefaults(), "chat")
    return rendered.text, rendered.echo, template


def test_messages_take_the_shape_of_openai() -> None:
    parts = common_pb2.ContentParts(
        parts=[common_pb2.ContentPart(text="a"), common_pb2.ContentPart(text="b")]
    )
    call = common_pb2.ToolCall(id="1", name="f", arguments_json='{"x":1}')
    _, _, template = render(
        common_pb2.ChatMessage(role="user", parts=parts),
        common_pb2.ChatMessage(role="assistant", tool_calls=[call], reasoning="hm"),
        message("tool", "42", tool_call_id="1", name="f"),
    )
    assert list(template.messages) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x":1}'},
                }
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "f"},
    ]


def test_a_tool_without_a_schema_takes_any_object() -> None:
    _, _, template = render(message("user", "x"), tools=[common_pb2.Tool(name="f")])
    (tool,) = template.others["tools"]
    assert tool["function"]["parameters"] == {"type": "object"}


CLOSED = common_pb2.FINAL_MESSAGE_CLOSED
CONTINUED = common_pb2.FINAL_MESSAGE_CONTINUED
REASONING = common_pb2.FINAL_MESSAGE_CONTINUED_REASONING
CONTENT = common_pb2.FINAL_MESSAGE_CONTINUED_CONTENT


def test_a_trailing_assistant_message_stays_open_by_default() -> None:
    text, echo, template = render(message("user", "x"), message("assistant", "so"))
    assert (text, echo) == ("TEXT:so", "")
    assert len(template.messages) == 1
    assert template.others["opens"]


def test_the_echo_repeats_what_is_held() -> None:
    *_, echo, _ = render(message("assistant", "so"), echo_final_message=True)
    assert echo == "so"


def test_the_parts_of_an_open_message_are_joined() -> None:
    parts = common_pb2.ContentParts(
        parts=[common_pb2.ContentPart(text="a"), common_pb2.ContentPart(text="b")]
    )
    text, *_ = render(common_pb2.ChatMessage(role="assistant", parts=parts))
    assert text == "TEXT:a\n\nb"


def test_a_closed_message_is_rendered_with_the_others() -> None:
    text, _, template = render(message("assistant", "so"), final_message=CLOSED)
    assert text == "TEXT:"
    assert len(template.messages) == 1


@pytest.mark.parametrize("asked", [True, False])
def test_the_opening_of_a_turn_can_be_left_out(asked: bool) -> None:
    *_, template = render(message("user", "x"), add_generation_prompt=asked)
    assert template.others["opens"] == asked


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([message("user", "x")], "chat.final_message"),
        ([], "chat.final_message"),
        ([message("assistant", "a"), message("assistant", "b")], "chat.messages[1].role"),
        (
            [message("assistant", "a", tool_calls=[common_pb2.ToolCall(name="f")])],
            "chat.messages[0].tool_calls",
        ),
    ],
)
def test_what_cannot_be_continued(messages: list[common_pb2.ChatMessage], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        render(*messages, final_message=CONTINUED)
    assert caught.value.field == field


class Thinker:
    """Writes turns as Qwen3 does."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        del tools
        text = "".join(
            f"{one['role']}:"
            + (f"<t>\n{one['reasoning_content']}\n</t>\n\n" if "reasoning_content" in one else "")
            + f"{one['content']};"
            for one in messages
        )
        if not add_generation_prompt:
            return text
        return (
            text
            + {None: "A:", True: "A:<t>\n", False: "A:<t>\n\n</t>\n\n"}[
                (extra or {}).get("enable_thinking")
            ]
        )


@pytest.mark.parametrize(
    ("held", "final", "kwargs", "expected", "thinking"),
    [
        (("", "hm"), CONTINUED, "", "<t>\nhm", "<t>\nhm"),
        (("", "hm"), CONTINUED, '{"enable_thinking":true}', "<t>\nhm", "<t>\nhm"),
        (("", "hm"), CONTINUED, '{"enable_thinking":false}', "<t>\nhm", "<t>\nhm"),
        (("so", "hm"), CONTINUED, "", "<t>\nhm\n</t>\n\nso", ""),
        (("so", ""), CONTINUED, "", "<t>\n\n</t>\n\nso", ""),
        (("so", "hm"), REASONING, "", "<t>\nhm", "<t>\nhm"),
        (("", "hm"), CONTENT, "", "<t>\nhm\n</t>\n\n", ""),
    ],
)
def test_a_turn_goes_on_in_its_reasoning_or_behind_it(
    held: tuple[str, str],
    final: common_pb2.FinalMessage.ValueType,
    kwargs: str,
    expected: str,
    thinking: str,
) -> None:
    content, reasoning = held
    chat = common_pb2.ChatPrompt(
        messages=[message("user", "<t>"), message("assistant", content, reasoning=reasoning)],
        final_message=final,
        echo_final_message=True,
        template_kwargs_json=kwargs,
    )
    rendered = render_chat(
        chat,
        Thinker(),
        GenerationDefaults(),
        "chat",
        ChatFormat("x", reasoning=framed(ReasoningTags("<t>", "</t>"), Thinker())),
    )
    assert rendered.text == f"user:<t>;A:{expected}"
    assert rendered.thinking == thinking
    assert rendered.echoed_reasoning == reasoning
    assert rendered.echo == ("" if thinking else content)


@pytest.mark.parametrize(
    ("family", "held"),
    [
        ("qwen3.5", "<think>\nhm\n</think>\n\nso"),
        ("minicpm-5", "<think>\nhm\n</think>\n\nso"),
        ("laguna", "<think>hm</think>so"),
    ],
)
def test_where_the_family_says_the_white_space_the_template_does_not(
    family: str, held: str
) -> None:
    """As llama.cpp has it for Nemotron 3, StepFun and Laguna, whose templates write a newline there."""

    class OneNewline:
        def render(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
            return "".join(
                f"{m['role']}:<think>\n{m.get('reasoning_content', '')}\n</think>\n{m['content']};"
                if m["role"] == "assistant"
                else f"{m['role']}:{m['content']};"
                for m in messages
            )

    (row,) = [one for one in FAMILIES if one.name == family]
    assert row.reasoning is not None
    chat_format = replace(row, reasoning=framed(row.reasoning, OneNewline()))
    chat = common_pb2.ChatPrompt(
        messages=[message("user", "x"), message("assistant", "so", reasoning="hm")],
        final_message=CONTINUED,
    )
    rendered = render_chat(chat, OneNewline(), GenerationDefaults(), "chat", chat_format)
    assert rendered.text == f"user:x;{held}"


def test_a_prompt_tells_whether_it_opened_reasoning() -> None:
    tags = ReasoningTags("<t>", "</t>")
    chats = [
        common_pb2.ChatPrompt(messages=[message("user", "x")], template_kwargs_json=kwargs)
        for kwargs in ("", '{"enable_thinking":true}', '{"enable_thinking":false}')
    ]
    found = [
        render_chat(
            chat, Thinker(), GenerationDefaults(), "c", ChatFormat("x", reasoning=tags)
        ).thinking
        for chat in chats
    ]
    assert found == ["", "<t>\n", ""]


def test_reasoning_of_a_model_that_does_not_think_cannot_be_continued() -> None:
    with pytest.raises(NotSupported):
        render(message("assistant", "a", reasoning="hm"))
    with pytest.raises(NotSupported):
        render(
            message("assistant", "a"),
            final_message=common_pb2.FINAL_MESSAGE_CONTINUED_REASONING,
        )


def test_effort_is_a_variable_and_none_turns_thinking_off() -> None:
    *_, low = render(message("user", "x"), reasoning_effort="low")
    *_, none = render(message("user", "x"), reasoning_effort="none")
    assert low.others["extra"] == {"reasoning_effort": "low"}
    assert none.others["extra"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": [common_pb2.Tool(name="f", parameters_json="[]")]},
        {"tools": [common_pb2.Tool(name="f", parameters_json="{")]},
        {"template_kwargs_json": "1"},
    ],
)
def test_json_that_is_no_object_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        render(message("user", "x"), **changes)


def test_arguments_of_a_call_must_be_an_object() -> None:
    call = common_pb2.ToolCall(name="f", arguments_json="[1]")
    with pytest.raises(InvalidField) as caught:
        render(message("assistant", "a", tool_calls=[call]), message("user", "x"))
    assert caught.value.field == "chat.messages[0].tool_calls[0].arguments_json"


@pytest.mark.parametrize(
    "text", ["", "nul", "1" * 5000, "[" * 100_000, '{"a":' * 100_000, '{"a":Infinity}', "null"]
)
def test_hostile_json(text: str) -> None:
    with pytest.raises(InvalidField):
        json_object(text, "f")
