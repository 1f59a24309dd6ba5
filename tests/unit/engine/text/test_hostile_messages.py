"""Text that no family writes: nothing is lost, nothing hangs, and little is held back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.chat_families import FAMILIES
from engine.text.chat_format import ChatFormat
from engine.text.chat_parser import MessageParser
from tests.unit.engine.text.reading import BY_NAME, cut, message, parse

_MARKS = sorted(
    {
        mark
        for family in FAMILIES
        for mark in (
            *(family.tools.marks if family.tools else ()),
            *(family.tools.starts if family.tools else ()),
            *((family.reasoning.start, family.reasoning.end) if family.reasoning else ()),
            *(block.start for block in family.blocks),
            family.header,
        )
        if mark
    }
)
_NOISE = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ":",
    ",",
    "\\",
    "'",
    "w",
    "n",
    "=",
    "(",
    ")",
    "7",
    " ",
    "\n",
    "\u00e9",
]
_NAMES = ["name", "arguments", "parameters", "tool_name", "<", "</", ">", '">', "<parameter="]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FAMILIES), st.data(), st.booleans())
def test_any_pieces_come_to_the_same(family: ChatFormat, data: st.DataObject, reads: bool):
    own = [mark for mark in _MARKS if mark in repr(family).replace("\\n", "\n")]
    parts = st.sampled_from([*own, *_NOISE, *_NAMES, *_MARKS])
    text = "".join(data.draw(st.lists(parts, max_size=20)))
    whole = parse(family, text, opening=family.header, reads_reasoning=reads)
    for size in (1, 3):
        assert (
            parse(family, *cut(text, size), opening=family.header, reads_reasoning=reads) == whole
        )


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.tools], ids=lambda one: one.name)
@pytest.mark.parametrize("tail", ["", "{", '{"name": "', "w", "[w(n='", '{"n": [', "<x>" * 5])
def test_little_is_held_back_of_what_does_not_end(family: ChatFormat, tail: str):
    assert family.tools is not None
    parser = MessageParser(family, parses_tools=True, reads_reasoning=True)
    parser.push(family.header + family.header + family.tools.start + tail)
    for filler in (
        "x" * 2_000,
        "<" * 2_000,
        "\\" * 2_000,
        " " * 2_000,
        '"' * 2_000,
        "\u00e9" * 500,
    ):
        for piece in cut(filler, 50):
            parser.push(piece)
            assert parser.num_held < 200


@pytest.mark.parametrize(
    ("family", "unit"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "w", "arguments": {"n": "'),
        ("qwen3.5", "<tool_call>\n<function=w>\n<parameter=n>\n"),
        ("lfm2", "<|tool_call_start|>[w(n='"),
        ("gemma-4", '<|tool_call>call:w{n:<|"|>'),
        ("minimax-m3", "]<]minimax[>[<tool_call>"),
        ("gpt-oss", "<|start|>assistant<|channel|>"),
        ("functionary-3.2", ">>>w\n{"),
        ("mistral", "[TOOL_CALLS]["),
        ("llama-3", "{"),
        ("content", "<think>"),
    ],
)
def test_a_long_text_of_marks(family: str, unit: str):
    chat_format = BY_NAME.get(family) or ChatFormat("content")
    text = unit * (100_000 // len(unit))
    whole = parse(chat_format, text)
    assert parse(chat_format, *cut(text, 4_099)) == whole


@pytest.mark.parametrize("family", ["hermes", "qwen3.5", "gemma-4", "lfm2", "content"])
def test_a_million_characters(family: str):
    chat_format = BY_NAME.get(family) or ChatFormat("content")
    start = chat_format.tools.start if chat_format.tools else ""
    text = start + '<so {"n": it\' [is]> ' * 45_000
    assert parse(chat_format, *cut(text, 4)) == parse(chat_format, text)


def test_what_is_no_call_is_content_as_it_stands():
    for text in (
        "<tool_call>so it is</tool_call>",
        '<tool_call>["name"]',
        "<tool_call>",
        "<tool_c",
    ):
        assert parse(BY_NAME["hermes"], *text) == (text, "", [])


def test_a_call_of_an_unknown_tool_is_one():
    text = '<tool_call>{"name": "who?", "arguments": {}}</tool_call>'
    assert parse(BY_NAME["hermes"], text) == ("", "", [("who?", "{}")])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "w", "arguments": "{\\"n\\": 7}"}', '{"n": 7}'),
        ('{"name": "w", "arguments": null}', "{}"),
        ('{"name": "w"}', "{}"),
        ('{"arguments": {"n": 7}, "name": "w"}', '{"n": 7}'),
        ('{"name": "w", "more": [1, {"name": "x"}], "arguments": {"n": 7}}', '{"n": 7}'),
    ],
)
def test_calls_that_the_format_does_not_write(text: str, arguments: str):
    call = f"<tool_call>{text}</tool_call>"
    assert parse(BY_NAME["hermes"], *call) == ("", "", [("w", arguments)])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3-coder", "<tool_call><function=w><parameter=n>7</parameter>so</function>"),
        ("glm-4", "<tool_call>w<arg_key>n</arg_key><arg_value>7</arg_value>so</tool_call>"),
        ("minimax-m3", ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="w">so'),
        ("gemma-4", "<|tool_call>call:w{n:7 so}"),
        ("lfm2", "<|tool_call_start|>[w(n=7, so)]<|tool_call_end|>"),
    ],
)
def test_arguments_that_break_off_are_json(family: str, text: str):
    _, _, calls = parse(BY_NAME[family], *text)
    assert [(name, json.loads(arguments).get("n", 7)) for name, arguments in calls] == [("w", 7)]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e", "01", "[1,", "{'a': 1}", "\ud800"])
def test_a_value_that_is_no_json_is_a_text(value: str):
    text = f"<tool_call><function=w><parameter=n>\n{value}\n</parameter></function></tool_call>"
    _, _, calls = parse(BY_NAME["qwen3-coder"], text)
    shown: Any = json.loads(calls[0][1])
    assert shown == {"n": value}


def test_a_message_is_what_all_pieces_told_and_no_more():
    parser = MessageParser(BY_NAME["hermes"], parses_tools=True, reads_reasoning=True)
    assert message(parser.push("a") + parser.finish() + parser.finish()) == ("a", "", [])
