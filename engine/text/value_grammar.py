"""The grammars of calls whose values are neither JSON nor texts between tags.

Source: llama.cpp `python_style_tool_calls` and its parser of Gemma 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.chat_format import DictFormat, PythonFormat
from engine.text.grammar.schema_rules import Rules, literal
from engine.text.grammar.until import until
from engine.text.parameter_kinds import Kind, kind_of, properties_of
from engine.text.tagged_grammar import CallableTool

_GAP = "[ \\t\\n]{0,8}"


def python_grammar(
    tools: PythonFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Returns GBNF of a list of calls with their keywords in any order, behind the opening mark."""
    rules = Rules()
    rules.add("gap", _GAP)
    rules.add_builtin("number")
    for quote, name in (("'", "single"), ('"', "double")):
        inner = f"[^\\\\{quote if quote == chr(39) else chr(92) + quote}\\x00-\\x1F] | [\\\\] [^\\x00-\\x1F]"
        rules.add(f"{name}-char", inner)
    rules.add("text", '"\'" single-char* "\'" | "\\"" double-char* "\\""')
    rules.add("word", '"True" | "False" | "None" | "true" | "false" | "null"')
    rules.add("list", '"[" gap (value (gap "," gap value)* gap)? "]"')
    rules.add("member", 'text gap ":" gap value')
    rules.add("dict", '"{" gap (member (gap "," gap member)* gap)? "}"')
    rules.add("value", "text | number | word | list | dict")
    calls = [_python_call(tool, rules, f"tool-{i}") for i, tool in enumerate(callable_tools)]
    call = rules.add("tool-call", " | ".join(calls))
    more = f' ("," gap {call})*' if parallel else ""
    rules.add("root", f'{literal(tools.start)} "[" gap {call}{more} gap "]" {literal(tools.end)}')
    return rules.write()


def _python_call(tool: CallableTool, rules: Rules, name: str) -> str:
    arguments = [
        rules.add(
            f"{name}-arg-{i}",
            f"{literal(key + '=')} {'text' if kind_of(schema) is Kind.STRING else 'value'}",
        )
        for i, (key, schema) in enumerate(properties_of(tool.parameters).items())
    ]
    inner = ""
    if arguments:
        one = rules.add(f"{name}-arg", " | ".join(arguments))
        inner = f'({one} ("," gap {one})*)? gap '
    return rules.add(name, f'{literal(tool.name + "(")} gap {inner}")"')


def dict_grammar(
    tools: DictFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Returns GBNF of calls with a dictionary of any members, behind the opening mark."""
    rules = Rules()
    rules.add("gap", _GAP)
    rules.add_builtin("number")
    rules.add("text", f"{literal(tools.quote)} {until(tools.quote, rules, 'text-rest')}")
    rules.add("word", '"true" | "false" | "null"')
    rules.add("list", '"[" gap (value ("," gap value)* gap)? "]"')
    rules.add("member", '[^:}{,\\x00-\\x1F]{1,128} ":" gap value')
    rules.add("dict", '"{" gap (member ("," gap member)* gap)? "}"')
    rules.add("value", "text | dict | list | number | word")
    names = " | ".join(literal(tool.name) for tool in callable_tools)
    call = rules.add("tool-call", f"{literal(tools.start)} ({names}) dict {literal(tools.end)}")
    rules.add("root", f"{call}+" if parallel else call)
    return rules.write()
