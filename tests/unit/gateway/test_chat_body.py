"""A chat body read: what becomes of each of its members, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from kvarts.v1 import common_pb2, generation_pb2

from gateway.chat_body import ChatServer, read_chat_body
from gateway.errors import ApiError

USER = {"role": "user", "content": "Hi"}
PREFILL = {"role": "assistant", "content": "Once"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SERVER = ChatServer(use_jinja=True, prefill_assistant=True, template_kwargs={})
CLASSIC = ChatServer(use_jinja=False, prefill_assistant=True, template_kwargs={})


def test_messages_in_every_form():
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": None},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "sunny"},
    ]
    chat = read_chat_body({"messages": messages}, SERVER).chat
    system, user, assistant, tool = chat.messages
    assert [part.text for part in system.parts.parts] == ["a", "b"]
    assert user.WhichOneof("body") == "content"
    assert assistant.WhichOneof("body") is None
    assert assistant.reasoning == "hm"
    assert assistant.tool_calls[0].arguments_json == '{"x":1}'
    assert (tool.tool_call_id, tool.name, tool.content) == ("1", "f", "sunny")


def test_prefill_of_parts_is_joined_by_blank_lines():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = read_chat_body({"messages": [USER, {"role": "assistant", "content": parts}]}, SERVER)
    assert read.prefill == (generation_pb2.ChatDelta(content="a\n\nb"),)
    assert read.chat.final_message == common_pb2.FINAL_MESSAGE_CONTINUED
    assert read.chat.add_generation_prompt is False


def test_template_variables_are_merged():
    server = ChatServer(use_jinja=True, prefill_assistant=True, template_kwargs={"a": 1, "b": 2})
    body = {
        "messages": [USER],
        "chat_template_kwargs": {"b": 3, "enable_thinking": False},
        "reasoning_effort": "low",
    }
    chat = read_chat_body(body, server).chat
    assert chat.template_kwargs_json == '{"a":1,"b":3,"enable_thinking":false}'
    assert chat.reasoning_effort == "low"


@pytest.mark.parametrize(
    ("members", "limit"),
    [
        ({}, -1),
        ({"reasoning_budget_tokens": 5, "thinking_budget_tokens": 6}, 5),
        ({"thinking_budget_tokens": 6}, 6),
        ({"thinking_budget_tokens": "6"}, -1),
    ],
)
def test_the_limit_of_thinking_has_two_names(members: dict[str, Any], limit: int):
    read = read_chat_body({"messages": [USER]} | members, SERVER)
    assert read.fields["reasoning_budget_tokens"] == limit


def test_response_formats_become_a_schema():
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": schema}, schema),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, schema),
    ]
    for wanted, expected in cases:
        fields = read_chat_body({"messages": [USER], "response_format": wanted}, SERVER).fields
        assert fields.get("json_schema") == expected


REFUSED: list[tuple[dict[str, Any], ChatServer, int, str]] = [
    ({}, SERVER, 400, "'messages' is required"),
    ({"messages": "Hi"}, SERVER, 400, "Expected 'messages' to be an array"),
    (
        {"messages": [{"role": "user"}]},
        SERVER,
        400,
        "All non-assistant messages must contain 'content'",
    ),
    ({"messages": ["Hi"]}, SERVER, 400, "All non-assistant messages must contain 'content'"),
    (
        {"messages": [{"role": "assistant"}]},
        SERVER,
        400,
        "Assistant message must contain either 'content' or 'tool_calls'!",
    ),
    (
        {"messages": [{"content": "Hi"}]},
        SERVER,
        500,
        'Failed to parse messages: Missing \'role\' in message: {"content":"Hi"}',
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        SERVER,
        400,
        "Expected 'content' to be a string or an array",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        SERVER,
        500,
        "image input is not supported - hint: if this is unexpected, you may need to provide the "
        "mmproj",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        SERVER,
        400,
        "unsupported content[].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        SERVER,
        500,
        "Failed to parse messages: key 'text' not found",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "x"}]}]},
        SERVER,
        500,
        'Failed to parse messages: Unsupported tool call type: {"type":"x"}',
    ),
    (
        {"messages": [USER, PREFILL, PREFILL]},
        SERVER,
        400,
        "Cannot have 2 or more assistant messages at the end of the list.",
    ),
    (
        {"messages": [USER, PREFILL], "continue_final_message": True},
        SERVER,
        400,
        "Cannot set both add_generation_prompt and continue_final_message to true.",
    ),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": ""}}
                    ],
                },
            ]
        },
        SERVER,
        400,
        "Cannot continue an assistant message that contains tool calls.",
    ),
    ({"messages": [USER], "tool_choice": "always"}, SERVER, 400, "Invalid tool_choice: always"),
    (
        {"messages": [USER], "tools": "weather"},
        SERVER,
        500,
        'Failed to parse tools: Expected \'tools\' to be an array, got "weather"; tools = "weather"',
    ),
    (
        {"messages": [USER], "tools": [TOOL], "grammar": 'root ::= "a"'},
        SERVER,
        400,
        "Cannot use custom grammar constraints with tools.",
    ),
    (
        {"messages": [USER], "tools": [TOOL], "logprobs": True, "stream": True},
        SERVER,
        400,
        "logprobs is not supported with tools + stream",
    ),
    (
        {"messages": [USER], "response_format": {"type": "xml"}},
        SERVER,
        400,
        'response_format type must be one of "text" or "json_object", but got: xml',
    ),
    (
        {"messages": [USER], "json_schema": {}, "grammar": "x"},
        SERVER,
        500,
        "Cannot use both json_schema and grammar",
    ),
    (
        {"messages": [USER], "top_logprobs": 2},
        SERVER,
        400,
        "top_logprobs requires logprobs to be set to true",
    ),
    (
        {"messages": [USER], "reasoning_format": "secret"},
        SERVER,
        500,
        "Unknown reasoning format: secret",
    ),
    (
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": "yes"}},
        SERVER,
        400,
        'invalid type for "enable_thinking" (expected boolean, got string)',
    ),
    ({"messages": [USER], "tools": [TOOL]}, CLASSIC, 500, "tools param requires --jinja flag"),
    (
        {"messages": [USER], "tool_choice": "none"},
        CLASSIC,
        500,
        "tool_choice param requires --jinja flag",
    ),
]


@pytest.mark.parametrize(("body", "server", "status", "message"), REFUSED)
def test_refused(body: dict[str, Any], server: ChatServer, status: int, message: str):
    with pytest.raises(ApiError) as caught:
        read_chat_body(body, server)
    assert (caught.value.body.kind.status, caught.value.body.message) == (status, message)
