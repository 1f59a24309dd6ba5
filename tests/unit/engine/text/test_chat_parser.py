"""Messages out of text, whole and in any pieces: the pieces must come to the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.call_piece import CallPiece
from engine.text.chat_families import FAMILIES
from engine.text.chat_format import THINK, ChatFormat
from engine.text.chat_parser import Content, MessageParser, Reasoning
from engine.text.parameter_kinds import ParameterKinds
from tests.unit.engine.text.reading import BY_NAME, Message, parse

# With the white space that Qwen3's template writes.
QWEN_TAGS = replace(THINK, start_gap="\n", end_lead="\n", end_gap="\n\n")
THINKING_HERMES = ChatFormat("thinking", (), BY_NAME["hermes"].tools, QWEN_TAGS)
OPEN = {"opening": "<think>\n"}
HEADED = {"opening": "<|start|>assistant"}

CALL = '{"city": "Pa\\"}</tool_call>ris", "n": [1, {}]}'
KINDS = ParameterKinds([("w", {"properties": {"s": {"type": "string"}}})])
THINKING_CODER = replace(BY_NAME["qwen3.5"], reasoning=QWEN_TAGS)
SHAPED = {"parses_tools": False, "is_shaped": True}
CASES: list[tuple[ChatFormat, str, dict[str, Any], Message]] = [
    (BY_NAME["hermes"], "Hello <there>\n", {}, ("Hello <there>\n", "", [])),
    (
        BY_NAME["hermes"],
        f'Sure.\n<tool_call>\n{{"name": "w", "arguments": {CALL}}}\n</tool_call>',
        {},
        ("Sure.\n", "", [("w", CALL)]),
    ),
    (
        BY_NAME["hermes"],
        '<tool_call>{"name":"a","arguments":{}}</tool_call>\n'
        '<tool_call>{"name":"b","arguments":{"x":1}}</tool_call>',
        {},
        ("", "", [("a", "{}"), ("b", '{"x":1}')]),
    ),
    (
        BY_NAME["hermes"],
        '<tool_call>{"name":"a","arguments":{}}</tool_call>',
        {"parses_tools": False},
        ('<tool_call>{"name":"a","arguments":{}}</tool_call>', "", []),
    ),
    # Cut by a limit: what there is of the call.
    (BY_NAME["hermes"], '<tool_call>{"name": "w", "argu', {}, ("", "", [("w", "{")])),
    (THINKING_HERMES, "<think>\nhm, so\n</think>\n\nYes.", {}, ("Yes.", "hm, so\n", [])),
    # As llama-server reads what its model was made to say.
    (THINKING_HERMES, "<think>hm </think> Yes\n", {}, (" Yes\n", "hm ", [])),
    (THINKING_HERMES, "\n <think> hm</think>x", {}, ("x", " hm", [])),
    (THINKING_HERMES, "<think>hm</think>\nx", {}, ("x", "hm", [])),
    (THINKING_HERMES, "\nhm\n</think>\n\n Yes", {}, ("hm\n</think>\n\n Yes", "", [])),
    (THINKING_HERMES, "\n <think> x", {"reads_reasoning": False}, ("<think> x", "", [])),
    (THINKING_HERMES, "\nhm", OPEN, ("", "\nhm", [])),
    (THINKING_HERMES, "\nhm", {"opening": "<think>"}, ("", "hm", [])),
    (
        THINKING_HERMES,
        "\nhm",
        OPEN | {"reads_reasoning": False},
        ("<think>\n\nhm", "", []),
    ),
    (THINKING_HERMES, "no thought < of it", {}, ("no thought < of it", "", [])),
    (
        THINKING_HERMES,
        'hm</think><tool_call>{"name": "w", "arguments": {}}</tool_call>',
        OPEN,
        ("", "hm", [("w", "{}")]),
    ),
    (
        THINKING_HERMES,
        "<think>hm</think>Yes.",
        {"reads_reasoning": False},
        ("<think>hm</think>Yes.", "", []),
    ),
    (
        BY_NAME["mistral"],
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": "]"}, "id": "abcdefghi"}, '
        '{"name": "g", "arguments": {}}]',
        {},
        ("", "", [("f", '{"x": "]"}'), ("g", "{}")]),
    ),
    (
        BY_NAME["command-r7b"],
        "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        {},
        ("", "hm", [("f", '{"a": 1}')]),
    ),
    (
        BY_NAME["functionary-3.1"],
        '<function=go>{"a": 1}</function>',
        {},
        ("", "", [("go", '{"a": 1}')]),
    ),
    (
        BY_NAME["llama-3"],
        '{"name": "f", "parameters": {"x": {}}}',
        {},
        ("", "", [("f", '{"x": {}}')]),
    ),
    (BY_NAME["llama-3"], 'text {"name"', {}, ('text {"name"', "", [])),
    (
        BY_NAME["qwen3-coder"],
        "Sure.\n<tool_call>\n<function=w>\n<parameter=n>\n7\n</parameter>\n<parameter=s>\n"
        'a "b"\nc\n</parameter>\n</function>\n</tool_call>',
        {},
        ("Sure.\n", "", [("w", '{"n":7,"s":"a \\"b\\"\\nc"}')]),
    ),
    (
        BY_NAME["qwen3-coder"],
        "<tool_call>\n<function=w>\n<parameter=s>\n7\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=v>\n</function>\n</tool_call>",
        {"kinds": KINDS},
        ("", "", [("w", '{"s":"7"}'), ("v", "{}")]),
    ),
    (BY_NAME["qwen3-coder"], "<tool_call>\n<function=w>\n<param", {}, ("", "", [("w", "{")])),
    (
        replace(BY_NAME["glm-4"], reasoning=replace(THINK, end_gap="\n")),
        "<think>hm</think>\n<tool_call>w\n<arg_key>n</arg_key>\n<arg_value>7</arg_value>\n"
        "</tool_call>\n<tool_call>v</tool_call>",
        {},
        ("", "hm", [("w", '{"n":7}'), ("v", "{}")]),
    ),
    (
        BY_NAME["minimax-m2"],
        '<minimax:tool_call>\n<invoke name="w">\n<parameter name="n">7</parameter>\n</invoke>\n'
        '<invoke name="v">\n</invoke>\n</minimax:tool_call> and so',
        {},
        ("and so", "", [("w", '{"n":7}'), ("v", "{}")]),
    ),
    (
        BY_NAME["seed-oss"],
        "<seed:think>hm</seed:think><seed:tool_call>\n<function=w>\n<parameter=n>[7]</parameter>\n"
        "</function>\n</seed:tool_call>",
        {},
        ("", "hm", [("w", '{"n":[7]}')]),
    ),
    (
        BY_NAME["kimi-k2"],
        "Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.w:0"
        '<|tool_call_argument_begin|>{"n": 7}<|tool_call_end|><|tool_call_begin|>functions.v:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        {},
        ("Look:", "", [("w", '{"n": 7}'), ("v", "{}")]),
    ),
    (
        BY_NAME["deepseek-v3.1"],
        "hm</think><\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>w<\uff5ctool▁sep\uff5c>"
        '{"n": 7}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
        {"opening": "<think>"},
        ("", "hm", [("w", '{"n": 7}')]),
    ),
    (
        BY_NAME["deepseek-r1"],
        "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>w\n"
        '```json\n{"n": 7}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
        {},
        ("", "", [("w", '{"n": 7}')]),
    ),
    (BY_NAME["kimi-k2"], "\n <think> x</think>\ny", {}, ("\n <think> x</think>\ny", "", [])),
    (BY_NAME["kimi-k2"], "<think>\nx\n</think>\ny", {}, ("\ny", "\nx\n", [])),
    (THINKING_CODER, "<think>\n\n x </think> \ny ", {}, ("y ", "x ", [])),
    (THINKING_CODER, " \n x </think> \ny ", OPEN, ("y ", "x ", [])),
    (
        BY_NAME["gpt-oss"],
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        HEADED,
        ("Yes", "hm", []),
    ),
    (BY_NAME["gpt-oss"], "plain < text\n", HEADED, ("plain < text\n", "", [])),
    (BY_NAME["gpt-oss"], "<|channel|>final<|message|>Yes", HEADED, ("Yes", "", [])),
    (
        BY_NAME["ministral-3"],
        '[THINK]hm[/THINK]So.[TOOL_CALLS]w[ARGS]{"n": 7}[TOOL_CALLS]v[ARGS]{}',
        {},
        ("So.", "hm", [("w", '{"n": 7}'), ("v", "{}")]),
    ),
    (THINKING_HERMES, '\n```json\n{"a": "```"}\n```\n', SHAPED, ('{"a": "```"}', "", [])),
    (THINKING_HERMES, ' {"a": "`` "} ', SHAPED, ('{"a": "`` "}', "", [])),
    (THINKING_HERMES, "<think>x</think>\n```json 1 ```", SHAPED, ("1", "x", [])),
    (THINKING_HERMES, '```json\n{"a": "b`', SHAPED, ('{"a": "b', "", [])),
    (THINKING_HERMES, "```js", SHAPED, ("```js", "", [])),
]


@pytest.mark.parametrize(("chat_format", "text", "options", "expected"), CASES)
def test_a_whole_text(
    chat_format: ChatFormat, text: str, options: dict[str, Any], expected: Message
):
    assert parse(chat_format, text, **options) == expected


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_any_pieces_come_to_the_same_message(
    case: tuple[ChatFormat, str, dict[str, Any], Message], data: st.DataObject
):
    chat_format, text, options, expected = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    assert parse(chat_format, *pieces, **options) == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("text", ["{<function=>a</function> ", "{{{", "{ x {"])
def test_a_brace_that_begins_no_call_does_not_begin_one_for_ever(family: ChatFormat, text: str):
    parse(family, *text)
    parse(family, text)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*FAMILIES, THINKING_HERMES]),
    st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[",
                "]",
                "{",
                "}",
                '"name"',
                ":",
                ",",
                '"a"',
                '"arguments"',
                "<think>",
                "</think>",
                "<function=",
                ">",
                " ",
                "\\",
                '"',
                "x",
                "<|START_ACTION|>",
                "<|tool_call|>",
                "\n",
                "w",
                "<parameter=",
                "</parameter>",
                "</function>",
                "<arg_key>",
                "</arg_key>",
                "<arg_value>",
                "</arg_value>",
            ]
        ),
        max_size=14,
    ),
)
def test_any_text_is_read_to_its_end(chat_format: ChatFormat, pieces: list[str]):
    assert parse(chat_format, *pieces) == parse(chat_format, "".join(pieces))


def test_an_id_between_tags_is_the_calls():
    parser = MessageParser(BY_NAME["mistral-small-3.2"], parses_tools=True, reads_reasoning=True)
    deltas = parser.push('[TOOL_CALLS]f[CALL_ID]00000001a[ARGS]{"a": 1}') + parser.finish()
    (first, *_) = [delta for delta in deltas if isinstance(delta, CallPiece)]
    assert (first.name, first.call_id) == ("f", "00000001a")


def test_what_the_client_has_is_not_told_again():
    parser = MessageParser(THINKING_HERMES, parses_tools=True, reads_reasoning=True)
    parser.resume("<think>\nhm\n</think>\n\nSo <")
    assert parser.push("b> it") == [Content("b> it")]


def test_a_mark_that_the_prompt_began_is_one():
    parser = MessageParser(THINKING_HERMES, parses_tools=True, reads_reasoning=True)
    parser.resume("<think>\nhm</th")
    assert parser.push("ink>so") + parser.finish() == [Content("so")]


def test_reasoning_goes_on_where_the_prompt_left_it():
    parser = MessageParser(THINKING_HERMES, parses_tools=True, reads_reasoning=True)
    parser.resume("<think>\nhm")
    assert parser.push(" so") == [Reasoning(" so")]
