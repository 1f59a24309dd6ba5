"""What single families want of a conversation; the shapes are those that llama.cpp hands to them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.text.chat_template import ChatTemplate
from engine.text.message_quirks import apply_quirks

GEMMA = "'<|tool_call>call:'"


def call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **more}


def result(call_id: str, content: str = "1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


@pytest.mark.parametrize("source", ["<|tool_list_start|><|tool_list_end|>", "List of tools: ["])
def test_thoughts_are_called_thinking(source: str):
    (shown,) = apply_quirks(
        [{"role": "assistant", "content": "a", "reasoning_content": "hm"}], source
    )
    assert (shown["thinking"], shown["content"]) == ("hm", "a")


def test_what_thinks_and_calls_has_no_content():
    thinking, silent = apply_quirks(
        [calling(call("f", "1"), reasoning_content="hm"), calling(call("f", "1"))], "<|channel|>"
    )
    assert thinking["thinking"] == "hm"
    assert "content" not in thinking
    assert silent["content"] == ""


def test_thoughts_and_text_are_blocks():
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
    ]
    system, user, assistant = apply_quirks(messages, "[SYSTEM_PROMPT][TOOL_CALLS][ARGS]")
    assert system["content"] == [{"type": "text", "text": "be"}]
    assert user["content"] == "x"
    assert assistant == {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
    }


def test_results_stand_in_the_order_of_their_calls():
    user = {"role": "user", "content": "x"}
    first = calling(call("f", "1"), call("g", "2"))
    again = calling(call("f", "3"), call("g", "4"))
    messages = [user, first, result("2"), user, result("1"), again, result("4"), result("3")]
    shown = apply_quirks(messages, "dsml_token DSML tool_calls")
    assert [one.get("tool_call_id") for one in shown] == [
        None,
        None,
        "1",
        None,
        "2",
        None,
        "3",
        "4",
    ]


def test_a_turn_holds_its_results_and_the_answer():
    messages = [
        calling(call("f", "1"), call("g", "2"), reasoning_content="hm"),
        result("1", '{"n": 7}'),
        result("2", "seven"),
        result("3"),
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "x"},
    ]
    turn, user = apply_quirks(messages, GEMMA)
    assert turn["tool_responses"] == [
        {"name": "f", "response": {"n": 7}},
        {"name": "g", "response": "seven"},
        {"name": "3", "response": 1},
    ]
    assert (turn["content"], turn["reasoning_content"], user["role"]) == ("so", "hm", "user")


def test_a_newer_template_sees_results_as_they_are():
    messages = [calling(call("f", "1")), result("1")]
    assert apply_quirks(messages, GEMMA + "{#- OpenAI Chat Completions:") == messages


def test_space_around_texts_is_dropped():
    source = "You have access to the following functions in JSONSchema format"
    parts = [{"type": "text", "text": " b\n"}]
    text, listed = apply_quirks(
        [
            {"role": "assistant", "content": " a ", "reasoning_content": "\nhm "},
            {"role": "user", "content": parts},
        ],
        source,
    )
    assert (text["content"], text["reasoning_content"]) == ("a", "hm")
    assert listed["content"] == [{"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "opens", "expected"),
    [
        (GEMMA + "<turn|>\n\n", True, GEMMA + "<turn|>\n<|turn>model\n"),
        (GEMMA + "<turn|>\n\n", False, GEMMA + "<turn|>\n"),
        ("<|channel|>a<|return|>", False, "<|channel|>a<|end|>"),
        ("<|channel|>a<|return|>", True, "<|channel|>a<|return|>"),
    ],
)
def test_the_end_of_a_prompt_is_mended(source: str, opens: bool, expected: str):
    text = ChatTemplate(source).render(
        [{"role": "user", "content": "x"}], add_generation_prompt=opens
    )
    assert text == expected
