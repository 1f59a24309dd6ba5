"""The grammars of calls and shaped answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import BadSchema
from engine.text.chat_families import FAMILIES
from engine.text.chat_format import (
    THINK,
    ChatFormat,
    DictFormat,
    ElementFormat,
    PythonFormat,
    TaggedFormat,
    ToolFormat,
)
from engine.text.chat_grammar import answer_grammar, call_grammar
from engine.text.tagged_grammar import CallableTool
from tests.unit.engine.text.grammar.spelling import compiled, matches
from tests.unit.engine.text.reading import BY_NAME, parse

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
        kind = "" if tags.head_end else kind
        shown = (
            f"\n{tags.start}n{tags.name_end}{tags.head_end}{kind}{tags.value_start}7{tags.end}\n"
        )
    call_id = f"id1{tools.id_end}" if tools.id_end else ""
    name = f"{call_id}w{number}{tools.name_end}{tools.head_end}"
    return arguments, f"{tools.start}{tools.call_start}{name}{shown}{tools.call_end}{tools.end}"


def _written(tools: Any) -> tuple[str, str]:
    """A call of `w` with n = 7: arguments and text."""
    match tools:
        case TaggedFormat():
            return _tagged(tools)
        case PythonFormat():
            return '{"n":7}', f"{tools.start}[w(n=7)]{tools.end}"
        case DictFormat():
            return '{"n":7}', f"{tools.start}w{{n:7}}{tools.end}"
        case ElementFormat(prefix=at):
            call = f"{tools.call_start}w{tools.name_end}{at}<n>7{at}</n>{tools.call_end}"
            return '{"n":7}', f"{tools.start}{call}{tools.end}"
        case _:
            return '{"n": 7}', _json_call(tools)


def _json_call(tools: ToolFormat) -> str:
    arguments = '{"n": 7}'
    if tools.name_end:
        call_id = f"{tools.id_start}000000001" if tools.id_start else ""
        return f"{tools.start}w{call_id}{tools.name_end}{arguments}{tools.end}"
    if tools.name_is_key:
        call = f'{{"w": {arguments}}}'
    else:
        named = json.dumps({tools.name_key: "w"})[:-1]
        call = f'{named}, "{tools.arguments_key}": {arguments}}}'
    return tools.start + (f"[{call}]" if tools.is_list else call) + tools.end


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.tools], ids=lambda family: family.name
)
def test_what_a_familys_grammar_allows_its_parser_reads(family: ChatFormat):
    tools = family.tools
    assert tools is not None
    arguments, text = _written(tools)
    is_open = isinstance(tools, ToolFormat) and tools.is_open
    shown = text.removeprefix(tools.start) if is_open else text
    grammar = compiled(call_grammar(tools, TOOLS, parallel=False))
    assert matches(grammar, shown)
    assert not matches(grammar, shown.replace("w", "x", 1))
    assert not matches(grammar, shown[:-1])
    if not isinstance(tools, PythonFormat | DictFormat):
        assert not matches(grammar, shown.replace("7", '"7"'))
    begin = family.reasoning.end if family.reasoning and not family.reasoning.start else ""
    told = f"{begin}{family.header}{getattr(tools, 'recipient', '') and ' to=w'}{text}"
    assert parse(family, told) == ("", "", [("w", arguments)])


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


_NO_GRAMMAR_FOR_IT = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^\\d$"}}}


def test_a_pattern_that_is_passed_over_takes_no_rule_with_it():
    answer = answer_grammar(_NO_GRAMMAR_FOR_IT, None, is_open=False, is_strict=False)
    assert matches(compiled(answer), '{"n": "no digit"}')
    tools = BY_NAME["hermes"].tools
    assert tools is not None
    call = '<tool_call>{"name": "w", "arguments": {"n": "no digit"}}</tool_call>'
    grammar = call_grammar(tools, [CallableTool("w", _NO_GRAMMAR_FOR_IT)], parallel=False)
    assert matches(compiled(grammar), call)


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder", "minimax-m3"])
def test_a_fault_of_a_tool_names_the_tool(family: str):
    tools = BY_NAME[family].tools
    assert tools is not None
    broken = CallableTool("broken", {"type": "object", "properties": {"n": {"type": "odd"}}})
    with pytest.raises(BadSchema, match="unrecognized type odd") as raised:
        call_grammar(tools, [*TOOLS, broken], parallel=False)
    assert raised.value.path.startswith("broken#")


def test_one_call_or_several():
    tools = BY_NAME["hermes"].tools
    assert tools is not None
    call = '<tool_call>{"name": "v", "arguments": {}}</tool_call>'
    assert not matches(compiled(call_grammar(tools, TOOLS, parallel=False)), call + call)
    assert matches(compiled(call_grammar(tools, TOOLS, parallel=True)), f"{call}\n{call}")


_BAR = "\uff5c"
_TOKYO = f'<{_BAR}DSML{_BAR}parameter name="city" string="true">Tokyo</{_BAR}DSML{_BAR}parameter>'
_ONE = f'<{_BAR}DSML{_BAR}parameter name="n" string="false">-1.5</{_BAR}DSML{_BAR}parameter>'


def _dsml(section: str, *calls: tuple[str, str]) -> str:
    inner = "".join(
        f'<{_BAR}DSML{_BAR}invoke name="{name}">\n{parameter}\n</{_BAR}DSML{_BAR}invoke>\n'
        for name, parameter in calls
    )
    return f"<{_BAR}DSML{_BAR}{section}>\n{inner}</{_BAR}DSML{_BAR}{section}>"


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
