"""The grammar of calls between tags, from the mark that opens them on.

Source: llama.cpp `build_tool_parser_tag_tagged` and its parsers of single families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engine.text.chat_format import ParameterTags, TaggedFormat
from engine.text.grammar.schema_gbnf import SchemaWriter
from engine.text.grammar.schema_reader import read_schema
from engine.text.grammar.schema_rules import Rules, literal
from engine.text.grammar.until import until
from engine.text.parameter_kinds import Kind, kind_of, properties_of

# More parameters than that are required in their order: orders are many.
_MAX_PERMUTED = 4


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called: its name, and the JSON schema of its arguments."""

    name: str
    parameters: Any


def tagged_grammar(
    tools: TaggedFormat, callable_tools: Sequence[CallableTool], *, parallel: bool
) -> str:
    """Returns GBNF that begins with the opening mark; `parallel` allows several calls.

    Raises:
        BadSchema: A tool's parameters cannot be read.
    """
    rules = Rules()
    rules.add("gap", "[ \\t\\n]{0,8}")
    calls = [_call(tools, tool, rules, f"tool-{i}") for i, tool in enumerate(callable_tools)]
    call = rules.add("tool-call", " | ".join(calls))
    # Where a call has no tags of its own, a section holds one.
    inner = f"{call} (gap {call})*" if parallel and tools.call_start else call
    start = f"{literal(tools.start)} gap"
    end = f" gap {literal(tools.end)}"
    section = rules.add("section", f"{start} {inner}{end}")
    first = section
    if tools.opens_bare:
        first = rules.add("first-section", f"({start})? {inner} (gap {literal(tools.end)})?")
    between = "gap"
    if tools.between:
        between = f"{literal(tools.between + tools.recipient)} [^<>]{{1,64}}"
    rules.add("root", f"{first} ({between} {section})*" if parallel else first)
    return rules.write()


def _call(tools: TaggedFormat, tool: CallableTool, rules: Rules, name: str) -> str:
    number = '":" [0-9]{1,9} ' if tools.id_start else ""
    call_id = f"[a-zA-Z0-9_-]{{1,64}} {literal(tools.id_end)} " if tools.id_end else ""
    head = f"{literal(tools.call_start)} " if tools.call_start else ""
    head += f"{call_id}{literal(tool.name)} {number}"
    head += f"{literal(tools.name_end)} " if tools.name_end else ""
    head += f"{_attributes(tools.head_end)} " if tools.head_end else ""
    tail = f" gap {literal(tools.call_end)}" if tools.call_end else ""
    if tools.parameter is None:
        writer = SchemaWriter(
            read_schema(tool.parameters, f"{tool.name}#"), rules, prefix=f"{name}-"
        )
        arguments = writer.add(writer.root, f"{name}-arguments")
    else:
        arguments = _parameters(tools.parameter, tool, rules, name)
    return rules.add(name, f"{head}gap {arguments}{tail}")


def _attributes(end: str) -> str:
    """What may follow a name up to the end of its tag."""
    return f"[^<>]{{0,64}} {literal(end)}"


def _parameters(tags: ParameterTags, tool: CallableTool, rules: Rules, name: str) -> str:
    parameters = tool.parameters
    properties = properties_of(parameters)
    required = required_of(parameters)
    rule_of = {
        key: _parameter(tags, key, schema, tool, rules, f"{name}-arg-{i}")
        for i, (key, schema) in enumerate(properties.items())
    }
    musts = [rule for key, rule in rule_of.items() if key in required]
    others = [rule for key, rule in rule_of.items() if key not in required]
    text = _in_any_order(musts, rules, f"{name}-args")
    if others:
        text += f" ({' | '.join(f'{rule} gap' for rule in others)})*"
    return rules.add(f"{name}-arguments", text)


def required_of(parameters: Any) -> frozenset[str]:
    """Returns the names of the properties that a schema of an object requires."""
    if not isinstance(parameters, Mapping):
        return frozenset()
    names: Any = cast("Mapping[str, Any]", parameters).get("required")
    return frozenset(cast("list[str]", names)) if isinstance(names, list) else frozenset()


def _in_any_order(parts: Sequence[str], rules: Rules, name: str) -> str:
    if not parts:
        return '""'
    if len(parts) == 1 or len(parts) > _MAX_PERMUTED:
        return " ".join(f"{part} gap" for part in parts)
    ways: list[str] = []
    for i, part in enumerate(parts):
        rest = [*parts[:i], *parts[i + 1 :]]
        ways.append(f"{part} gap {_in_any_order(rest, rules, f'{name}-{i}')}")
    return rules.add(name, " | ".join(ways))


def _parameter(
    tags: ParameterTags, key: str, schema: Any, tool: CallableTool, rules: Rules, name: str
) -> str:
    head = literal(tags.start + key + tags.name_end)
    head += f" {_attributes(tags.head_end)}" if tags.head_end else ""
    head += f" gap {literal(tags.value_start)}" if tags.value_start else ""
    is_json = kind_of(schema) is Kind.JSON
    if tags.kind_marks:
        head += f" {literal(tags.kind_marks[is_json])}"
    if not is_json:
        return rules.add(name, f"{head} {until(tags.end, rules, 'text')}")
    shown = read_schema(alone(schema, tool.parameters), f"{tool.name}#/properties/{key}")
    writer = SchemaWriter(shown, rules, prefix=f"{name}-")
    value = writer.add(writer.root, f"{name}-value")
    return rules.add(name, f"{head} gap {value} gap {literal(tags.end)}")


def alone(schema: Any, parameters: Any) -> Any:
    """Returns a parameter's schema with the definitions that it may refer to."""
    shared = {
        key: cast("Mapping[str, Any]", parameters)[key]
        for key in ("$defs", "definitions")
        if isinstance(parameters, Mapping) and key in parameters
    }
    return {**cast("Mapping[str, Any]", schema), **shared} if shared else schema
