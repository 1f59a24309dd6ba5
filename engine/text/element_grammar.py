"""The grammar of calls whose arguments are elements inside elements.

Source: llama.cpp `common_chat_params_init_minimax_m3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.text.chat_format import ElementFormat
from engine.text.grammar.schema_gbnf import SchemaWriter
from engine.text.grammar.schema_reader import read_schema
from engine.text.grammar.schema_rules import Rules, literal
from engine.text.grammar.until import until
from engine.text.parameter_kinds import may_be_text, part_of, properties_of
from engine.text.tagged_grammar import CallableTool, alone, required_of

# Deeper than that a value is JSON.
_MAX_DEPTH = 8


def element_grammar(
    tools: ElementFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Returns GBNF that begins with the opening mark; `parallel` allows several calls.

    Raises:
        BadSchema: A tool's parameters cannot be read.
    """
    rules = Rules()
    rules.add("gap", "[ \\t\\n]{0,8}")
    calls = [
        rules.add(
            f"tool-{i}",
            f"{literal(tools.call_start + tool.name + tools.name_end)} gap "
            f"{_Elements(tools, tool, rules).members(tool.parameters, f'tool-{i}', 0)} "
            f"gap {literal(tools.call_end)}",
        )
        for i, tool in enumerate(callable_tools)
    ]
    call = rules.add("tool-call", " | ".join(calls))
    inner = f"{call} (gap {call})*" if parallel else call
    rules.add("root", f"{literal(tools.start)} gap {inner} gap {literal(tools.end)}")
    return rules.write()


class _Elements:
    """Writes the rules of one tool's elements."""

    def __init__(self, tools: ElementFormat, tool: CallableTool, rules: Rules) -> None:
        self._prefix = tools.prefix
        self._tool = tool
        self._rules = rules

    def members(self, schema: Any, name: str, depth: int) -> str:
        """The required elements in their order, then the others in any."""
        required = required_of(schema)
        musts: list[str] = []
        others: list[str] = []
        for i, (key, part) in enumerate(properties_of(schema).items()):
            rule = self._element(key, part, f"{name}-{i}", depth)
            (musts if key in required else others).append(rule)
        text = " gap ".join(musts)
        if others:
            text += f" (gap ({' | '.join(others)}))*"
        return text or '""'

    def _element(self, tag: str, schema: Any, name: str, depth: int) -> str:
        value = self._value(schema, f"{self._prefix}</{tag}>", name, depth)
        return self._rules.add(name, f"{literal(f'{self._prefix}<{tag}>')} {value}")

    def _value(self, schema: Any, close: str, name: str, depth: int) -> str:
        if may_be_text(schema):
            return until(close, self._rules, f"{name}-text")
        items = part_of(schema, "")
        if depth < _MAX_DEPTH and properties_of(schema):
            return f"gap {self.members(schema, name, depth + 1)} gap {literal(close)}"
        if depth < _MAX_DEPTH and isinstance(items, Mapping):
            item = self._element("item", items, f"{name}-item", depth + 1)
            return f"(gap {item})* gap {literal(close)}"
        shown = alone(cast("Mapping[str, Any]", schema), self._tool.parameters)
        document = read_schema(shown, f"{self._tool.name}#")
        writer = SchemaWriter(document, self._rules, prefix=f"{name}-")
        return f"{writer.add(writer.root, f'{name}-value')} {literal(close)}"
