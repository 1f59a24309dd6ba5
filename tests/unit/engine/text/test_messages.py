from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidField
from engine.text.messages import TemplateCaps, join_parts, shape_messages

PARTS = [{"type": "text", "text": text} for text in ("one", "", "two")]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def shape(messages: list[dict[str, Any]], source: str = "", **caps: bool) -> list[dict[str, Any]]:
    return shape_messages(messages, TemplateCaps(**caps), source)


class TestContent:
    def test_parts_become_lines_for_templates_that_take_text(self) -> None:
        assert shape([{"role": "user", "content": PARTS}])[0]["content"] == "one\n\ntwo"

    def test_parts_stay_for_templates_that_take_them(self) -> None:
        shaped = shape([{"role": "user", "content": PARTS}], supports_typed_content=True)
        assert shaped[0]["content"] == PARTS

    def test_text_becomes_a_part_for_templates_that_take_nothing_else(self) -> None:
        message = {"role": "user", "content": "one"}
        shaped = shape([message], supports_typed_content=True, supports_string_content=False)
        assert shaped[0]["content"] == [{"type": "text", "text": "one"}]

    @pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "user", "content": None}])
    def test_no_content_is_empty_text(self, message: dict[str, Any]) -> None:
        assert shape([message]) == [{"role": message["role"], "content": ""}]

    def test_a_delimiter_never_comes_first(self) -> None:
        assert join_parts([{"text": ""}, {"text": "a"}, {"text": "b"}], "\n\n") == "a\n\nb"


class TestRoles:
    def test_developer_is_system_except_for_harmony(self) -> None:
        message = {"role": "developer", "content": "x"}
        assert shape([message])[0]["role"] == "system"
        assert shape([message], source="... <|channel|> ...")[0]["role"] == "developer"

    def test_system_moves_into_the_next_message_where_templates_have_none(self) -> None:
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": "Ho"},
        ]
        shaped = shape(messages, supports_system_role=False)
        assert [message["content"] for message in shaped] == ["Be kind.\nHi", "Ho"]
        assert shape(messages[:1], supports_system_role=False) == []


class TestCalls:
    def test_members_come_in_one_order_and_unknown_ones_go(self) -> None:
        message = {
            **{"tool_calls": [CALL], "refusal": None, "name": "n", "tool_call_id": "t"},
            **{"reasoning_content": "r", "content": "c", "role": "assistant"},
        }
        (shaped,) = shape([message])
        assert list(shaped) == [
            *("role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls")
        ]
        assert list(shaped["tool_calls"][0]) == ["type", "function", "id"]

    def test_arguments_become_an_object_where_templates_want_one(self) -> None:
        message = {"role": "assistant", "tool_calls": [CALL]}
        shaped = shape([message], supports_object_arguments=True)
        assert shaped[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert shape([message])[0]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        assert CALL["function"] == {"name": "f", "arguments": '{"a": 1}'}

    def test_arguments_that_are_not_json_are_named(self) -> None:
        bad = {**CALL, "function": {"name": "f", "arguments": "{"}}
        messages = [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": [bad]}]
        with pytest.raises(InvalidField, match=r"messages\[1\].tool_calls.*'f' are not JSON"):
            shape(messages, supports_object_arguments=True)
