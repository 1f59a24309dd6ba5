"""Messages out of text, whole and in any pieces: the pieces must come to the same."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadSchema
from engine.text.call_reader import CallPiece
from engine.text.chat_format import FAMILIES, THINK, ChatFormat, TaggedFormat, find_format
from engine.text.chat_grammar import answer_grammar, call_grammar
from engine.text.chat_parser import Content, Delta, MessageParser, Reasoning
from engine.text.parameter_kinds import ParameterKinds
from engine.text.tagged_grammar import CallableTool
from tests.unit.engine.text.grammar.spelling import compiled, matches

BY_NAME = {family.name: family for family in FAMILIES}
# With the white space that Qwen3's template writes.
QWEN_TAGS = replace(THINK, start_gap="\n", end_lead="\n", end_gap="\n\n")
THINKING_HERMES = ChatFormat("thinking", (), BY_NAME["hermes"].tools, QWEN_TAGS)

Message = tuple[str, str, list[tuple[str, str]]]


def message(deltas: list[Delta]) -> Message:
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        if isinstance(delta, CallPiece):
            name, arguments = calls.get(delta.index, ("", ""))
            assert not (name and delta.name)
            calls[delta.index] = (name + delta.name, arguments + delta.arguments)
    return content, reasoning, list(calls.values())


def parse(chat_format: ChatFormat, *pieces: str, **options: Any) -> Message:
    told: dict[str, Any] = {"parses_tools": True, "reads_reasoning": True} | options
    parser = MessageParser(chat_format, **told)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return message(deltas + parser.finish())


CALL = '{"city": "Pa\\"}</tool_call>ris", "n": [1, {}]}'
KINDS = ParameterKinds([("w", {"properties": {"s": {"type": "string"}}})])
THINKING_CODER = replace(BY_NAME["qwen3-coder"], reasoning=QWEN_TAGS)
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
    (THINKING_HERMES, "<think>hm</think>\nx", {}, ("\nx", "hm", [])),
    (THINKING_HERMES, "\nhm\n</think>\n\n Yes", {}, ("hm\n</think>\n\n Yes", "", [])),
    (THINKING_HERMES, "\n <think> x", {"reads_reasoning": False}, ("<think> x", "", [])),
    (THINKING_HERMES, "\nhm", {"begins_in_reasoning": True}, ("", "\nhm", [])),
    (THINKING_HERMES, "\nhm", {"begins_in_reasoning": True, "gap_is_open": True}, ("", "hm", [])),
    (
        THINKING_HERMES,
        "\nhm",
        {"begins_in_reasoning": True, "reads_reasoning": False},
        ("\nhm", "", []),
    ),
    (THINKING_HERMES, "no thought < of it", {}, ("no thought < of it", "", [])),
    (
        THINKING_HERMES,
        'hm</think><tool_call>{"name": "w", "arguments": {}}</tool_call>',
        {"begins_in_reasoning": True},
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
        {"begins_in_reasoning": True},
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
    (THINKING_CODER, " \n x </think> \ny ", {"begins_in_reasoning": True}, ("y ", "x ", [])),
    (
        BY_NAME["gpt-oss"],
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        {},
        ("Yes", "hm", []),
    ),
    (BY_NAME["gpt-oss"], "plain < text\n", {}, ("plain < text\n", "", [])),
    (BY_NAME["gpt-oss"], "<|channel|>final<|message|>Yes", {}, ("Yes", "", [])),
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


TOOLS = [
    CallableTool(
        "w", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    ),
    CallableTool("v", {"type": "object", "properties": {}}),
]


def _tagged(tools: TaggedFormat) -> tuple[str, str]:
    """A call as a family's templates write it: arguments and text."""
    number, tags = ":0" if tools.id_start else "", tools.parameter
    arguments = '{"n": 7}'
    shown = arguments
    if tags is not None:
        arguments = '{"n":7}'
        kind = tags.kind_marks[1] if tags.kind_marks else "\n"
        shown = f"\n{tags.start}n{tags.name_end}{kind}{tags.value_start}7{tags.end}\n"
    call = f"{tools.call_start}w{number}{tools.name_end}{shown}{tools.call_end}"
    return arguments, f"{tools.start}{call}{tools.end}"


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.tools], ids=lambda family: family.name
)
def test_what_a_familys_grammar_allows_its_parser_reads(family: ChatFormat):
    tools = family.tools
    assert tools is not None
    arguments = '{"n": 7}'
    if isinstance(tools, TaggedFormat):
        arguments, text = _tagged(tools)
        grammar = compiled(call_grammar(tools, TOOLS, parallel=False))
        assert matches(grammar, text)
        assert not matches(grammar, text.replace("7", '"7"'))
        assert parse(family, text) == ("", "", [("w", arguments)])
        return
    if tools.name_end:
        call_id = f"{tools.id_start}000000001" if tools.id_start else ""
        call = f"w{call_id}{tools.name_end}{arguments}"
    else:
        call = json.dumps({tools.name_key: "w"})[:-1] + f', "{tools.arguments_key}": {arguments}}}'
    text = tools.start + (f"[{call}]" if tools.is_list else call) + tools.end
    grammar = compiled(call_grammar(tools, TOOLS, parallel=False))
    assert matches(grammar, text)
    assert not matches(grammar, text.replace("7", '"7"'))
    assert parse(family, text) == ("", "", [("w", arguments)])


@pytest.mark.parametrize(
    ("text", "is_open", "fits"),
    [
        ('{"n":7}', False, True),
        ('```json\n{"n": 7}\n```', False, True),
        ("```json\n{}\n```", False, False),
        ('{"n":7} and more', False, False),
        ('<think>hm < </ </thin</think>\n{"n":7}', False, True),
        ('<think>hm</think>{"n":"7"}', False, False),
        ('hm</think>{"n":7}', True, True),
        ('</</think>{"n":7}', True, True),
        ('{"n":7}', True, False),
        ('hm{"n":7}', False, False),
    ],
)
def test_what_a_shaped_answer_may_be(text: str, is_open: bool, fits: bool):
    schema = TOOLS[0].parameters
    grammar = answer_grammar(schema, THINK, is_open=is_open, is_strict=True)
    assert matches(compiled(grammar), text) == fits


def test_a_shaped_answer_stands_where_its_family_puts_content():
    family = BY_NAME["gpt-oss"]
    grammar = answer_grammar(
        TOOLS[0].parameters,
        family.reasoning,
        is_open=False,
        is_strict=True,
        content_start=family.content_start,
    )
    final, answer = "<|channel|>final<|message|>", '{"n":7}'
    analysis = "<|channel|>analysis<|message|>hm<|end|>"
    assert matches(compiled(grammar), final + answer)
    assert matches(compiled(grammar), f"{analysis}<|start|>assistant{final}{answer}")
    assert not matches(compiled(grammar), answer)
    assert not matches(compiled(grammar), analysis + answer)


def test_a_shaped_answer_without_reasoning_begins_at_once():
    grammar = answer_grammar(TOOLS[0].parameters, None, is_open=False, is_strict=True)
    assert matches(compiled(grammar), '{"n":7}')
    assert not matches(compiled(grammar), '<think></think>{"n":7}')


def test_a_keyword_without_a_grammar_is_passed_over_only_if_asked():
    schema: Any = {"properties": {"a": {"not": {}}}}
    answer_grammar(schema, None, is_open=False, is_strict=False)
    with pytest.raises(BadSchema, match="not cannot be honoured"):
        answer_grammar(schema, None, is_open=False, is_strict=True)


def test_one_call_or_several():
    tools = BY_NAME["hermes"].tools
    assert tools is not None
    call = '<tool_call>{"name": "v", "arguments": {}}</tool_call>'
    assert not matches(compiled(call_grammar(tools, TOOLS, parallel=False)), call + call)
    assert matches(compiled(call_grammar(tools, TOOLS, parallel=True)), f"{call}\n{call}")


@pytest.mark.parametrize(
    ("template", "name", "thinks"),
    [
        ("{{ messages }}", "content", False),
        ('<tool_call>{"name": x, "arguments": y}</tool_call>', "hermes", False),
        ('<think></think><tool_call>"name" "arguments"</tool_call>', "hermes", True),
        ("{% if x %}</think>{% endif %}", "content", True),
        ('[TOOL_CALLS] "name" "arguments"', "mistral", False),
        ('<|start_header_id|> {"name": f, "parameters": p}', "llama-3", False),
        ("<tool_call>\\n<function=' + n + '>\\n<parameter=' + k", "qwen3-coder", False),
        ("<tool_call>' + n <arg_key> <arg_value> </think>", "glm-4", True),
        ("<role>ASSISTANT</role> <tool_call> <arg_key> <arg_value>", "content", False),
    ],
)
def test_a_template_tells_its_family(template: str, name: str, thinks: bool):
    found = find_format(template)
    assert (found.name, found.reasoning is not None) == (name, thinks)


# Texts and messages of llama.cpp's tests of the same templates.
_BAR = "\uff5c"
_TOKYO = f'<{_BAR}DSML{_BAR}parameter name="city" string="true">Tokyo</{_BAR}DSML{_BAR}parameter>'
_ONE = f'<{_BAR}DSML{_BAR}parameter name="n" string="false">-1.5</{_BAR}DSML{_BAR}parameter>'


def _dsml(section: str, *calls: tuple[str, str]) -> str:
    inner = "".join(
        f'<{_BAR}DSML{_BAR}invoke name="{name}">\n{parameter}\n</{_BAR}DSML{_BAR}invoke>\n'
        for name, parameter in calls
    )
    return f"<{_BAR}DSML{_BAR}{section}>\n{inner}</{_BAR}DSML{_BAR}{section}>"


FROM_THE_PEERS_TESTS: list[tuple[str, str, Message]] = [
    (
        "deepseek-v3.2",
        "<think>Let me check</think>\n\n" + _dsml("function_calls", ("time", _TOKYO)),
        ("", "Let me check", [("time", '{"city":"Tokyo"}')]),
    ),
    (
        "deepseek-v3.2",
        "<think>x</think>Let me call.\n\n"
        + _dsml("function_calls", ("time", _TOKYO), ("sum", _ONE)),
        ("Let me call.", "x", [("time", '{"city":"Tokyo"}'), ("sum", '{"n":-1.5}')]),
    ),
    ("deepseek-v4", _dsml("tool_calls", ("sum", _ONE)), ("", "", [("sum", '{"n":-1.5}')])),
    ("deepseek-v4", "a\n\nb\n\n", ("a\n\nb\n\n", "", [])),
    (
        "nemotron-v2",
        '<think>hm</think><TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
        ("", "hm", [("f", '{"a": 1}')]),
    ),
    (
        "gigachat-3",
        'Hello<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
        ("Hello", "", [("f", '{"a": 1}')]),
    ),
    (
        "gigachat-3.1",
        '<|function_call|>{"name": "f", "arguments": {"a": 1}}',
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        "command-r-plus",
        'Action:\n```json\n[{"tool_name": "f", "parameters": {"a": 1}}]\n```',
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        "mistral-nemo",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]',
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        "mistral-small-3.2",
        '[TOOL_CALLS]f[CALL_ID]000000001[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]000000002[ARGS]{}',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "gpt-oss",
        '<|channel|>commentary to=functions.f<|message|>{"a": 1}',
        ("", "", [("f", '{"a": 1}')]),
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        ("", "hm", [("f", '{"a": 1}')]),
    ),
]


@pytest.mark.parametrize(("family", "text", "expected"), FROM_THE_PEERS_TESTS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_the_peer_reads_of_a_family(family: str, text: str, expected: Message, size: int):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse(BY_NAME[family], *pieces) == expected


def test_an_id_between_tags_is_the_calls():
    parser = MessageParser(BY_NAME["mistral-small-3.2"], parses_tools=True, reads_reasoning=True)
    deltas = parser.push('[TOOL_CALLS]f[CALL_ID]00000001a[ARGS]{"a": 1}') + parser.finish()
    (first, *_) = [delta for delta in deltas if isinstance(delta, CallPiece)]
    assert (first.name, first.call_id) == ("f", "00000001a")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("gpt-oss", "<|channel|>commentary to=functions.v <|constrain|>json<|message|>{}"),
        ("gpt-oss", "<|channel|>commentary to=functions.v<|message|>{}"),
        ("mistral-small-3.2", "[TOOL_CALLS]v[CALL_ID]00000001a[ARGS]{}"),
        ("command-r-plus", 'Action:\n```json\n[{"tool_name": "v", "parameters": {}}]\n```'),
        ("nemotron-v2", '<TOOLCALL>[{"name": "v", "arguments": {}}]</TOOLCALL>'),
        ("gigachat-3.1", '<|function_call|>{"name": "v", "arguments": {}}'),
        ("deepseek-v3.2", _dsml("function_calls", ("v", ""))),
    ],
)
def test_a_grammar_allows_what_the_family_writes(family: str, text: str):
    tools = BY_NAME[family].tools
    assert tools is not None
    assert matches(compiled(call_grammar(tools, TOOLS, parallel=True)), text)


def test_a_parameter_says_what_it_is_by_its_schema():
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "number"}},
        "required": ["city", "n"],
    }
    tools = BY_NAME["deepseek-v4"].tools
    assert tools is not None
    grammar = compiled(call_grammar(tools, [CallableTool("f", schema)], parallel=False))
    assert matches(grammar, _dsml("tool_calls", ("f", f"{_TOKYO}\n{_ONE}")))
    wrong = _ONE.replace("false", "true")
    assert not matches(grammar, _dsml("tool_calls", ("f", f"{_TOKYO}\n{wrong}")))
