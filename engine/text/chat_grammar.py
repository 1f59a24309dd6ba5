"""The grammar of a family's tool calls, from the mark that opens them on.

Source: llama.cpp `standard_json_tools` and `build_tool_parser_tag_json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.text.chat_format import ToolFormat
from engine.text.grammar.schema_gbnf import SchemaWriter
from engine.text.grammar.schema_reader import read_schema
from engine.text.grammar.schema_rules import Rules, constant, literal


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called: its name, and the JSON schema of its arguments."""

    name: str
    parameters: Any


def call_grammar(
    tools: ToolFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Returns GBNF that begins with the opening mark; `parallel` allows several calls.

    Raises:
        BadSchema: A tool's parameters cannot be read.
    """
    rules = Rules()
    calls = [_call(tools, tool, rules, f"tool-{i}") for i, tool in enumerate(callable_tools)]
    call = rules.add("tool-call", " | ".join(calls))
    start, end = _mark(tools.start), _mark(tools.end)
    if tools.is_list:
        more = f' (space "," space {call})*' if parallel else ""
        rules.add("root", f'{start}space "[" space {call}{more} space "]" space {end}')
        return rules.write()
    section = rules.add("tool-section", f"{start}{_gap(tools)}{call} space {end}")
    rules.add("root", f"{section} (space {section})*" if parallel else section)
    return rules.write()


def _gap(tools: ToolFormat) -> str:
    return "" if tools.name_end else "space "


def _mark(text: str) -> str:
    return f"{literal(text)} " if text else ""


def _call(tools: ToolFormat, tool: CallableTool, rules: Rules, name: str) -> str:
    writer = SchemaWriter(read_schema(tool.parameters), rules, prefix=f"{name}-")
    arguments = writer.add(writer.root, f"{name}-arguments")
    if tools.name_end:
        return rules.add(name, f"{literal(tool.name + tools.name_end)} space {arguments}")
    # An id of nine letters and digits, as the one family wants that checks it.
    call_id = ""
    if tools.id_key:
        key = constant(tools.id_key)
        call_id = f' ("," space {key} space ":" space "\\"" [a-zA-Z0-9]{{9}} "\\"" space)?'
    head = f'{constant(tools.name_key)} space ":" space {constant(tool.name)} space'
    tail = f'{constant(tools.arguments_key)} space ":" space {arguments}'
    return rules.add(name, f'"{{" space {head} "," space {tail} space{call_id} "}}"')
