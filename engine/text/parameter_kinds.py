"""Which parameters of tools are written as plain text, and which as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Any, cast


class Kind(Enum):
    """How a parameter's value is written."""

    STRING = auto()
    JSON = auto()
    # Text, read as JSON where it is some.
    EITHER = auto()


class ParameterKinds:
    """Knows the parameters of the tools that are offered. Immutable."""

    def __init__(self, tools: Iterable[tuple[str, Any]] = ()) -> None:
        """Reads the schemas of tools, given as (name, schema of the arguments)."""
        tools = tuple(tools)
        self._schemas = dict(tools)
        self._kinds = {
            (tool, name): kind_of(schema)
            for tool, parameters in tools
            for name, schema in properties_of(parameters).items()
        }

    def kind(self, tool: str, parameter: str) -> Kind:
        """Returns a parameter's kind; one that no schema names may be either."""
        return self._kinds.get((tool, parameter), Kind.EITHER)

    def schema(self, tool: str) -> Any:
        """Returns the schema of a tool's arguments; None for a tool that is not offered."""
        return self._schemas.get(tool)


def part_of(schema: Any, name: str) -> Any:
    """Returns the schema of a property, or with "" that of a list's items; None where none says."""
    if name:
        return properties_of(schema).get(name)
    return cast("Mapping[str, Any]", schema).get("items") if isinstance(schema, Mapping) else None


def properties_of(parameters: Any) -> dict[str, Any]:
    """Returns the schemas of an object's properties; none where it has none."""
    if not isinstance(parameters, Mapping):
        return {}
    properties = cast("Mapping[str, Any]", parameters).get("properties")
    return dict(cast("Mapping[str, Any]", properties)) if isinstance(properties, Mapping) else {}


def kind_of(schema: Any) -> Kind:
    """Returns how values of a schema are written; what names no type may be a string."""
    if not isinstance(schema, Mapping):
        return Kind.EITHER
    members = cast("Mapping[str, Any]", schema)
    listed: Any = members.get("enum", [members["const"]] if "const" in members else None)
    if isinstance(listed, list) and listed:
        are_texts = [isinstance(value, str) for value in cast("list[Any]", listed)]
        return _kind(any(are_texts), all(are_texts))
    types: Any = members.get("type")
    if isinstance(types, str):
        types = [types]
    if not isinstance(types, list):
        has_shape = "properties" in members or "items" in members
        return Kind.JSON if has_shape else Kind.EITHER
    return _kind("string" in types, types == ["string"])


def may_be_text(schema: Any) -> bool:
    """Says whether a value of a schema may be a text, one of its alternatives being one."""
    if isinstance(schema, Mapping):
        members = cast("Mapping[str, Any]", schema)
        for key in ("anyOf", "oneOf"):
            if isinstance(members.get(key), list):
                return any(may_be_text(one) for one in cast("list[Any]", members[key]))
    return kind_of(schema) is not Kind.JSON


def _kind(may_be_text: bool, is_text: bool) -> Kind:
    if is_text:
        return Kind.STRING
    return Kind.EITHER if may_be_text else Kind.JSON
