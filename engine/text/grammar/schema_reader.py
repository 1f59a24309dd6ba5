"""A JSON schema's object to nodes: which keywords decide, which are passed over, what is refused.

Which keywords decide is llama.cpp's choice, down to the order; what it passes over in silence is
reported. Nesting and size are bounded.

Source: llama.cpp `common_chat_schema_from_json`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from engine.errors import BadSchema
from engine.text.grammar.gbnf import MAX_REPETITION
from engine.text.grammar.schema_nodes import (
    AllOf,
    AnyOf,
    AnyValue,
    Document,
    Ignored,
    IntegerRange,
    List,
    Object,
    OneValueOf,
    Primitive,
    Property,
    Reference,
    Schema,
    Text,
    Tuple,
)

MAX_DEPTH = 64
MAX_NODES = 20_000
_MAX_COUNT = 2**31 - 1
_MAX_BOUND = 2**63 - 1
_MAX_IGNORED = 100

# Keywords that say nothing about which values are valid.
_ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "$vocabulary",
        "default",
        "definitions",
        "deprecated",
        "description",
        "example",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_UUID_FORMATS = frozenset({"uuid", "uuid1", "uuid2", "uuid3", "uuid4", "uuid5"})
_TIME_FORMATS = frozenset({"date", "time", "date-time"})
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
}

_Members = Mapping[str, Any]


def read_schema(schema: Any, at: str = "#") -> Document:
    """Reads a schema.

    Args:
        schema: What the JSON text holds.
        at: Where it stands, for what is refused.

    Raises:
        BadSchema: It is malformed, refers to nothing, or is too large; names path and keyword.
    """
    reader = _Reader(schema)
    root = reader.read(schema, at, 0)
    return Document(root, reader.targets, tuple(reader.ignored))


class _Reader:
    def __init__(self, root: Any) -> None:
        self.targets: dict[str, Schema] = {}
        self.ignored: list[Ignored] = []
        self._root = root
        self._being_read: set[str] = set()
        self._num_nodes = 0

    def read(self, value: Any, path: str, depth: int) -> Schema:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            _fail(path, f"the schema comes to more than {MAX_NODES} parts")
        if depth > MAX_DEPTH:
            _fail(path, f"the schema is nested more than {MAX_DEPTH} deep")
        if not isinstance(value, dict):
            _fail(path, "schema must be an object")
        members = cast("_Members", value)
        if "$ref" in members:
            self._pass_over(members, path, "$ref")
            return self._reference(members["$ref"], path, depth)
        for key in ("oneOf", "anyOf"):
            if key in members:
                self._pass_over(members, path, key)
                return AnyOf(self._children(members[key], f"{path}/{key}", depth))
        if isinstance(members.get("type"), list):
            return self._any_type(members, path, depth)
        if "const" in members:
            return self._values(members, path, "const", [members["const"]])
        if "enum" in members:
            values = members["enum"]
            if not isinstance(values, list) or not values:
                _fail(path, "enum must be a non-empty array")
            return self._values(members, path, "enum", cast("list[Any]", values))
        return self._typed(members, path, depth)

    def _any_type(self, members: _Members, path: str, depth: int) -> Schema:
        kinds = cast("list[Any]", members["type"])
        if not kinds:
            _fail(path, "type must not be empty")
        return AnyOf(
            tuple(
                self.read({**members, "type": kind}, f"{path}/type/{i}", depth + 1)
                for i, kind in enumerate(kinds)
            )
        )

    def _values(self, members: _Members, path: str, key: str, values: list[Any]) -> Schema:
        known = [key]
        types = _JSON_TYPES.get(str(members.get("type")), ())
        if types and all(_is_of(value, types) for value in values):
            known.append("type")
        self._pass_over(members, path, *known)
        return OneValueOf(tuple(values), is_const=key == "const")

    def _typed(self, members: _Members, path: str, depth: int) -> Schema:
        kind = members.get("type")
        if kind is not None and not isinstance(kind, str):
            _fail(path, "type must be a string or an array of strings")
        # Without a type the structural keywords decide.
        has_members = "properties" in members or (
            "additionalProperties" in members and members["additionalProperties"] is not True
        )
        has_parts = "allOf" in members
        match kind or "":
            case "object" if has_members or not has_parts:
                return self._object(members, path, depth)
            case "string" if not has_parts:
                return self._text(members, path)
            case "object" | "string":
                return self._all_of(members, path, depth)
            case "array":
                return self._array(members, path, depth)
            case "integer":
                return self._integer(members, path)
            case "number" | "boolean" | "null":
                self._pass_over(members, path, "type")
                return Primitive(cast("str", kind))
            case "":
                return self._untyped(members, path, depth, has_members=has_members)
            case _:
                _fail(path, f"unrecognized type {kind}")

    def _untyped(self, members: _Members, path: str, depth: int, *, has_members: bool) -> Schema:
        if has_members:
            return self._object(members, path, depth)
        if "allOf" in members:
            return self._all_of(members, path, depth)
        if "items" in members or "prefixItems" in members:
            return self._array(members, path, depth)
        has_length = "minLength" in members or "maxLength" in members
        if "pattern" in members or has_length or self._format(members, path):
            return self._text(members, path)
        self._pass_over(members, path, "type")
        return AnyValue()

    def _all_of(self, members: _Members, path: str, depth: int) -> Schema:
        self._pass_over(members, path, "type", "allOf")
        return AllOf(self._children(members["allOf"], f"{path}/allOf", depth))

    def _children(self, value: Any, path: str, depth: int) -> tuple[Schema, ...]:
        if not isinstance(value, list):
            _fail(path, "must be an array of schemas")
        children = cast("list[Any]", value)
        if not children:
            _fail(path, "must not be empty")
        return tuple(self.read(child, f"{path}/{i}", depth + 1) for i, child in enumerate(children))

    def _object(self, members: _Members, path: str, depth: int) -> Schema:
        required = _strings(members.get("required"))
        given = members.get("properties", {})
        if not isinstance(given, dict):
            _fail(path, "properties must be an object")
        properties = tuple(
            Property(
                name, self.read(schema, f"{path}/properties/{name}", depth + 1), name in required
            )
            for name, schema in cast("dict[str, Any]", given).items()
        )
        known = ["type", "properties", "additionalProperties"]
        if required <= {entry.name for entry in properties}:
            known.append("required")
        self._pass_over(members, path, *known)
        return Object(properties, self._additional(members, path, depth))

    def _additional(self, members: _Members, path: str, depth: int) -> Schema | None:
        if "additionalProperties" not in members:
            # An object of which nothing else is said is any object.
            return None if "properties" in members else AnyValue()
        value = members["additionalProperties"]
        if isinstance(value, bool):
            return AnyValue() if value else None
        if not isinstance(value, dict):
            _fail(path, "additionalProperties must be a boolean or a schema")
        return self.read(value, f"{path}/additionalProperties", depth + 1)

    def _array(self, members: _Members, path: str, depth: int) -> Schema:
        key = next((key for key in ("items", "prefixItems") if key in members), None)
        if key is not None and isinstance(members[key], list):
            self._pass_over(members, path, "type", key)
            items = cast("list[Any]", members[key])
            return Tuple(
                tuple(
                    self.read(item, f"{path}/{key}/{i}", depth + 1) for i, item in enumerate(items)
                )
            )
        self._pass_over(members, path, "type", key or "items", "minItems", "maxItems")
        child = AnyValue() if key is None else self.read(members[key], f"{path}/{key}", depth + 1)
        # The first item stands before what is repeated.
        low, high = _counts(members, "Items", path, num_before=1)
        return List(child, low, high)

    def _text(self, members: _Members, path: str) -> Schema:
        pattern = members.get("pattern", "")
        if not isinstance(pattern, str):
            _fail(path, "pattern must be a string")
        name = self._format(members, path)
        if pattern or name:
            self._pass_over(members, path, "type", "pattern" if pattern else "format")
            low = _count(members, "minLength", path)
            return Text(pattern, name, low or 0, _count(members, "maxLength", path), path)
        self._pass_over(members, path, "type", "minLength", "maxLength")
        low, high = _counts(members, "Length", path)
        return Text("", "", low, high, path)

    def _format(self, members: _Members, path: str) -> str:
        name = members.get("format", "")
        if not isinstance(name, str):
            _fail(path, "format must be a string")
        if name in _UUID_FORMATS:
            return "uuid"
        return name if name in _TIME_FORMATS else ""

    def _integer(self, members: _Members, path: str) -> Schema:
        low_key = "minimum" if "minimum" in members else "exclusiveMinimum"
        high_key = "maximum" if "maximum" in members else "exclusiveMaximum"
        self._pass_over(members, path, "type", low_key, high_key)
        low = _bound(members, low_key, path, rounds_up=low_key == "minimum")
        high = _bound(members, high_key, path, rounds_up=high_key == "exclusiveMaximum")
        if low is not None and low_key == "exclusiveMinimum":
            low += 1
        if high is not None and high_key == "exclusiveMaximum":
            high -= 1
        if low is not None and high is not None and low > high:
            _fail(path, f"no integer is between {low} and {high}")
        return IntegerRange(low, high)

    def _reference(self, ref: Any, path: str, depth: int) -> Schema:
        if not isinstance(ref, str):
            _fail(path, "$ref must be a string")
        if not ref.startswith("#/"):
            problem = "only references into the same document are supported"
            _fail(path, f"unsupported $ref {ref}, {problem}")
        if ref not in self.targets and ref not in self._being_read:
            self._being_read.add(ref)
            self.targets[ref] = self.read(self._resolve(ref, path), ref, depth + 1)
        return Reference(ref)

    def _resolve(self, ref: str, path: str) -> Any:
        target = self._root
        for name in ref[2:].split("/"):
            if isinstance(target, dict) and name in target:
                target = cast("_Members", target)[name]
            elif isinstance(target, list):
                items = cast("list[Any]", target)
                is_index = name.isascii() and name.isdigit() and len(name) < 10
                if not is_index or int(name) >= len(items):
                    _fail(path, f"cannot resolve $ref {ref}, {name} is out of range")
                target = items[int(name)]
            else:
                _fail(path, f"cannot resolve $ref {ref}, {name} not found")
        return target

    def _pass_over(self, members: _Members, path: str, *known: str) -> None:
        """Notes the keywords that are neither known here nor mere annotations."""
        for key in members:
            if key in known or key in _ANNOTATIONS or key.startswith("x-"):
                continue
            if len(self.ignored) < _MAX_IGNORED:
                self.ignored.append(Ignored(path, key))


def _strings(value: Any) -> set[str]:
    if not isinstance(value, list):
        return set()
    return {item for item in cast("list[Any]", value) if isinstance(item, str)}


def _counts(
    members: _Members, what: str, path: str, *, num_before: int = 0
) -> tuple[int, int | None]:
    """Returns how many of something there are, as far as a grammar can repeat it.

    So many stand before what is repeated; where no more may follow, the least number is passed
    over, as the peer does.
    """
    low = _count(members, f"min{what}", path) or 0
    high = _count(members, f"max{what}", path)
    if high is not None and high <= num_before:
        return low, high
    if low > MAX_REPETITION + num_before:
        _fail(path, f"min{what} {low} is more than {MAX_REPETITION + num_before}")
    if high is not None and low > high:
        _fail(path, f"min{what} {low} is more than max{what} {high}")
    return low, high


def _count(members: _Members, key: str, path: str) -> int | None:
    if key not in members:
        return None
    value = members[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        _fail(path, f"{key} must be a non-negative integer")
    return value


def _bound(members: _Members, key: str, path: str, *, rounds_up: bool) -> int | None:
    if key not in members:
        return None
    value = members[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _fail(path, f"{key} must be a number")
    if abs(value) >= _MAX_BOUND:
        _fail(path, f"{key} must be below 2^63 in magnitude")
    return math.ceil(value) if rounds_up else math.floor(value)


def _is_of(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _fail(path: str, detail: str) -> NoReturn:
    raise BadSchema(path, detail)
