"""Bodies of other dialects as chat bodies: what llama-server makes of them, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gateway import anthropic_body, responses_body
from gateway.errors import ApiError

USER = {"role": "user", "content": "Hi"}


def _messages(**body: Any) -> dict[str, Any]:
    return anthropic_body.to_chat_body({"messages": [USER], **body})


class TestAnthropic:
    def test_what_a_body_says_nothing_of(self) -> None:
        assert _messages() == {"messages": [USER], "max_tokens": 4096}

    def test_only_known_fields_survive(self) -> None:
        body: dict[str, Any] = {
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 3,
            "stream": True,
            "seed": 1,
            "lora": [],
        }
        chat = _messages(**body, stop_sequences=["x"], max_tokens=None)
        assert chat == {
            "messages": [USER], "max_tokens": None, "stop": ["x"],
            "temperature": 1, "top_p": 0.5, "top_k": 3, "stream": True,
        }  # fmt: skip

    def test_system_texts_are_joined(self) -> None:
        blocks = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
        assert _messages(system=blocks)["messages"][0] == {"role": "system", "content": "ab"}
        assert _messages(system="s")["messages"] == [{"role": "system", "content": "s"}, USER]

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            ("x-anthropic-billing-header: a; cch=1a2b3;You", None),
            ("x-anthropic-billing-header: a; cch=1a2b3You", "same"),
            ("x-anthropic-billing-header: a; cch=1", "same"),
            ("Say cch=1a2b3;", "same"),
        ],
    )
    def test_a_stamp_that_no_prefix_would_survive_is_blotted_out(
        self, given: str, kept: str | None
    ) -> None:
        content = _messages(system=given)["messages"][0]["content"]
        assert content == (given if kept else given.replace("1a2b3", "fffff"))

    def test_blocks_become_content_calls_reasoning_and_results(self) -> None:
        said = [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            {"type": "strange"},
        ]
        got = [
            {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [
                {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "tool_result", "tool_use_id": "c3"},
            {"type": "text", "text": "And?"},
        ]  # fmt: skip
        chat = anthropic_body.to_chat_body(
            {"messages": [{"role": "assistant", "content": said}, {"role": "user", "content": got}]}
        )
        assert chat["messages"] == [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Let me see."}],
                "tool_calls": [
                    {"id": "c1", "type": "function",
                     "function": {"name": "f", "arguments": '{"a":1}'}}],
                "reasoning_content": "hm",
            },
            {"role": "user", "content": [{"type": "text", "text": "And?"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c2", "content": "ab"},
            {"role": "tool", "tool_call_id": "c3", "content": ""},
        ]  # fmt: skip

    def test_images_become_urls(self) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": "QQ=="}
        blocks = [{"type": "image", "source": source}, {"type": "image", "source": {"type": "x"}}]
        chat = anthropic_body.to_chat_body({"messages": [{"role": "user", "content": blocks}]})
        url = {"url": "data:image/png;base64,QQ=="}
        assert chat["messages"][0]["content"] == [{"type": "image_url", "image_url": url}]

    def test_tools_and_choices(self) -> None:
        schema = {"type": "object"}
        chat = _messages(
            tools=[{"name": "f", "description": "d", "input_schema": schema}, {}],
            tool_choice={"type": "any"},
        )
        assert chat["tools"] == [
            {"type": "function", "function": {
                "name": "f", "description": "d", "parameters": schema}},
            {"type": "function", "function": {"name": "", "description": "", "parameters": {}}},
        ]  # fmt: skip
        assert chat["tool_choice"] == "required"
        assert "tool_choice" not in _messages(tool_choice={"type": "none"})

    @pytest.mark.parametrize(("budget", "read"), [(5, 5), ("x", 10000), (None, 10000)])
    def test_thinking_has_a_budget(self, budget: Any, read: int) -> None:
        chat = _messages(thinking={"type": "enabled", "budget_tokens": budget})
        assert chat["thinking_budget_tokens"] == read
        assert "thinking_budget_tokens" not in _messages(thinking={"type": "disabled"})

    def test_messages_are_required(self) -> None:
        with pytest.raises(ApiError, match="'messages' is required"):
            anthropic_body.to_chat_body({})


NOT_UNDERSTOOD: list[tuple[dict[str, Any], str]] = [
    ({}, "'input' is required"),
    ({"input": "a", "previous_response_id": "r"}, "previous_response_id"),
    ({"input": 5}, "must be a string or array of objects"),
    ({"input": [5]}, "Cannot determine type of 'item'"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "requires 'text'"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "'input_file'"),
    ({"input": [{"role": "user", "content": [5]}]}, "'type' must be one of 'input_text'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'image_url'"),
    ({"input": [{"role": "assistant", "type": "message", "content": [5]}]}, "'output_text'"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "is not an array"),
    ({"input": [{"type": "reasoning", "summary": [], "content": []}]}, "is empty"),
    ({"input": [{"type": "reasoning", "summary": [], "content": [5]}]}, "is not a string"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{}]}]},
     "missing 'type'"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": [
        {"type": "x"}]}]}, "should be 'Input text'"),
    ({"input": "a", "tools": {}}, "'tools' must be an array"),
]  # fmt: skip


class TestResponses:
    def test_a_text_is_the_users(self) -> None:
        chat = responses_body.to_chat_body(
            {"input": "Hi", "instructions": "Be kind.", "max_output_tokens": 3, "seed": 4,
             "reasoning": {"effort": "low"}}
        )  # fmt: skip
        assert chat == {
            "messages": [{"role": "system", "content": "Be kind."}, USER],
            "max_tokens": 3, "seed": 4, "reasoning_effort": "low",
        }  # fmt: skip

    def test_items_of_the_assistant_are_one_turn(self) -> None:
        items = [
            {"role": "user", "content": "Hi", "status": "completed"},
            {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "r"}]},
            {"type": "function_call_output", "call_id": "c1", "output": [
                {"type": "input_text", "text": "sunny"}]},
            {"type": "message", "role": "assistant", "content": "b"},
        ]  # fmt: skip
        text = {"type": "text"}
        assert responses_body.to_chat_body({"input": items})["messages"] == [
            {"role": "user", "content": [{"text": "Hi", **text}]},
            {
                "role": "assistant",
                "content": [{"text": "a", **text}, {"refusal": "r", "type": "refusal"}],
                "reasoning_content": "hm",
                "tool_calls": [
                    {"function": {"arguments": "{}", "name": "f"}, "id": "c1", "type": "function"}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"text": "sunny", **text}]},
            {"role": "assistant", "content": [{"text": "b", **text}]},
        ]

    def test_only_functions_are_tools(self) -> None:
        tools = [{"type": "function", "name": "f"}, {"type": "web_search"},
                 {"type": "function", "name": "g", "strict": False}]  # fmt: skip
        chat = responses_body.to_chat_body({"input": "", "tools": tools})
        assert chat["tools"] == [
            {"type": "function", "function": {"strict": True, "name": "f"}},
            {"type": "function", "function": {"strict": False, "name": "g"}},
        ]
        assert "tools" not in responses_body.to_chat_body({"input": "", "tools": tools[1:2]})

    @pytest.mark.parametrize(("body", "message"), NOT_UNDERSTOOD)
    def test_what_is_not_understood_is_named(self, body: dict[str, Any], message: str) -> None:
        with pytest.raises(ApiError, match=message):
            responses_body.to_chat_body(body)
