"""The grammars of a family's messages: tool calls from their mark on, and answers to a schema.

Source: llama.cpp `standard_json_tools`, `build_tool_parser_tag_json` and `build_parser`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import BadSchema
from engine.text.answer_reader import FENCE, FENCE_END
from engine.text.chat_format import (
    CallFormat,
    DictFormat,
    ElementFormat,
    PythonFormat,
    ReasoningTags,
    TaggedFormat,
    ToolFormat,
)
from engine.text.element_grammar import element_grammar
from engine.text.grammar.schema_gbnf import SchemaWriter
from engine.text.grammar.schema_reader import read_schema
from engine.text.grammar.schema_rules import Rules, constant, literal
from engine.text.grammar.until import until
from engine.text.tagged_grammar import CallableTool, tagged_grammar
from engine.text.value_grammar import dict_grammar, python_grammar

_ID = "[a-zA-Z0-9]{9}"


def call_grammar(
    tools: CallFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Returns GBNF that begins with the opening mark; `parallel` allows several calls.

    Raises:
        BadSchema: A tool's parameters cannot be read.
    """
    match tools:
        case TaggedFormat():
            return tagged_grammar(tools, callable_tools, parallel=parallel)
        case PythonFormat():
            return python_grammar(tools, callable_tools, parallel=parallel)
        case DictFormat():
            return dict_grammar(tools, callable_tools, parallel=parallel)
        case ElementFormat():
            return element_grammar(tools, callable_tools, parallel=parallel)
        case ToolFormat():
            return _json_grammar(tools, callable_tools, parallel=parallel)


def _json_grammar(
    tools: ToolFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    rules = Rules()
    calls = [_call(tools, tool, rules, f"tool-{i}") for i, tool in enumerate(callable_tools)]
    call = rules.add("tool-call", " | ".join(calls))
    parallel = parallel and not tools.is_single
    start, end = _starts(tools), _mark(tools.end)
    if tools.is_list:
        more = f' (space "," space {call})*' if parallel else ""
        rules.add("root", f'{start}space "[" space {call}{more} space "]" space {end}')
        return rules.write()
    if tools.is_row:
        more = f" (space {call})*" if parallel else ""
        rules.add("root", f"{start}space {call}{more} space {end}")
        return rules.write()
    inner = f"{_gap(tools)}{call} space {end}"
    section = rules.add("tool-section", f"{start}{inner}")
    first = inner if tools.is_open else section
    rules.add("root", f"{first} (space {section})*" if parallel else first)
    return rules.write()


def _gap(tools: ToolFormat) -> str:
    return "" if tools.name_end else "space "


def _starts(tools: ToolFormat) -> str:
    if not tools.other_starts:
        return _mark(tools.start)
    return f"({' | '.join(map(literal, tools.starts))}) "


def _mark(text: str) -> str:
    return f"{literal(text)} " if text else ""


def _call(tools: ToolFormat, tool: CallableTool, rules: Rules, name: str) -> str:
    writer = SchemaWriter(read_schema(tool.parameters, f"{tool.name}#"), rules, prefix=f"{name}-")
    arguments = writer.add(writer.root, f"{name}-arguments")
    if tools.name_end:
        head = literal(tool.name)
        if tools.id_start:
            head += f" {literal(tools.id_start)} {_ID}"
        head += _notes(tools)
        return rules.add(name, f"{head} {literal(tools.name_end)} space {arguments}")
    if tools.name_is_key:
        key = constant(tool.name)
        return rules.add(name, f'"{{" space {key} space ":" space {arguments} space "}}"')
    # An id of nine letters and digits, as the one family wants that checks it.
    first_id = last_id = ""
    if tools.id_key and tools.id_first:
        first_id = (
            f'({constant(tools.id_key)} space ":" space "\\"" [0-9]{{1,3}} "\\"" space "," space)? '
        )
    elif tools.id_key:
        key = constant(tools.id_key)
        last_id = f' ("," space {key} space ":" space "\\"" {_ID} "\\"" space)?'
    head = f'{first_id}{constant(tools.name_key)} space ":" space {constant(tool.name)} space'
    tail = f'{constant(tools.arguments_key)} space ":" space {arguments}'
    return rules.add(name, f'"{{" space {head} "," space {tail} space{last_id} "}}"')


def _notes(tools: ToolFormat) -> str:
    """A channel behind the name where it opened the call, and the kind of what follows."""
    if not tools.note_starts:
        return ""
    constrain, channel, _ = tools.note_starts
    channels = f'({literal(channel)} ("commentary" | "analysis"))?'
    return f' {channels} (" "? {literal(constrain)}? "json")?'


def answer_grammar(
    schema: Any,
    reasoning: ReasoningTags | None,
    *,
    is_open: bool,
    is_strict: bool,
    content_start: str = "",
) -> str:
    """Returns GBNF of a whole answer: reasoning or none, then what a schema allows, fenced or not.

    Args:
        schema: What its JSON text holds.
        reasoning: The texts around reasoning; None allows none.
        is_open: The prompt has opened the reasoning.
        is_strict: Refuses keywords that are not honoured.
        content_start: Opens an answer without reasoning.

    Raises:
        BadSchema: The schema is malformed, too large, or not honoured; names path and keyword.
    """
    rules = Rules()
    writer = SchemaWriter(read_schema(schema), rules, prefix="answer-")
    answer = writer.add(writer.root, "answer")
    if is_strict and writer.ignored:
        first = writer.ignored[0]
        raise BadSchema(first.path, f"{first.keyword} cannot be honoured")
    fenced = f"{literal(FENCE)} space {answer} space {literal(FENCE_END)}"
    thinking = f"{literal(content_start)} " if content_start else ""
    if reasoning is not None:
        thinking = _thinking(reasoning, rules, content_start, is_open=is_open)
    rules.add("root", f"{thinking}space ({fenced} | {answer} space)")
    return rules.write()


def _thinking(reasoning: ReasoningTags, rules: Rules, content_start: str, *, is_open: bool) -> str:
    inside = until(reasoning.end, rules, "thinking")
    if reasoning.end_gap.strip():
        inside += f" {literal(reasoning.end_gap)}"
    if is_open:
        return f"{inside} "
    thought = f"space {literal(reasoning.start)} {inside}"
    return f"({thought} | {literal(content_start)}) " if content_start else f"({thought})? "
