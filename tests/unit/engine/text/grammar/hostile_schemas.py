"""Schemas and regular expressions of an attacker: drawn, so that a number says which one it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object") * 3 + ("strange",)
_FORMATS = ("date", "time", "date-time", "uuid", "uuid5", "email", "")
_NUMBERS = (-(10**30), -(2**63), -1, 0, 1, 7, 99, 2**31, 2**53 + 1, 10**30, 0.5, -1e300)
_COUNTS = (0, 1, 2, 3, 9, 50, 99, 500, 999, 2000, 2001, 10**5, -1, 10**9, 2**31, 10**30)
_KEYS = ("a", "b", "ab", "", "a/b", "a~b", '"', "\\", "\x01", "日本", "x" * 200)

_ODD: tuple[Any, ...] = (True, False, None, 7, "object", [], {})
_VALUES: tuple[Any, ...] = (*_NUMBERS, *_KEYS, None, True, [1, {"a": []}], {"b": "c"})


def schema(seed: int) -> Any:
    """A schema of a few levels: well formed, malformed, contradictory, wide or deep."""
    draw = random.Random(seed)
    names = [f"d{i}" for i in range(draw.randrange(6))]
    drawn: Any = _node(draw, draw.randrange(1, 6), names)
    if names and isinstance(drawn, dict):
        drawn["$defs"] = {name: _node(draw, 2, names) for name in names}
    return cast("Any", drawn)


def _node(draw: random.Random, depth: int, names: list[str]) -> Any:
    if draw.random() < 0.04:
        return draw.choice(_ODD)
    choices = [_scalar, _string, _range, _enumeration, _reference]
    if depth:
        choices += [_object, _object, _array, _combination]
    return draw.choice(choices)(draw, depth - 1, names)


def _scalar(draw: random.Random, depth: int, names: list[str]) -> Any:
    del depth, names
    kinds = draw.choices(_TYPES, k=draw.randrange(1, 4))
    return {"type": kinds[0] if len(kinds) == 1 else kinds}


def _string(draw: random.Random, depth: int, names: list[str]) -> Any:
    del depth, names
    drawn: dict[str, Any] = {"type": "string"}
    if draw.random() < 0.4:
        drawn["minLength"] = draw.choice(_COUNTS)
    if draw.random() < 0.6:
        drawn["maxLength"] = draw.choice(_COUNTS)
    if draw.random() < 0.3:
        drawn["format"] = draw.choice(_FORMATS)
    if draw.random() < 0.3:
        drawn["pattern"] = regex(draw.randrange(1 << 30))
    return drawn


def _range(draw: random.Random, depth: int, names: list[str]) -> Any:
    del depth, names
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    drawn: dict[str, Any] = {"type": draw.choice(("integer", "integer", "number"))}
    return drawn | {key: draw.choice(_NUMBERS) for key in draw.sample(keys, draw.randrange(1, 4))}


def _enumeration(draw: random.Random, depth: int, names: list[str]) -> Any:
    del depth, names
    if draw.random() < 0.3:
        return {"const": draw.choice(_VALUES)}
    return {"enum": draw.choices(_VALUES, k=draw.choice((0, 1, 5, 300)))}


def _reference(draw: random.Random, depth: int, names: list[str]) -> Any:
    del depth
    places = [f"#/$defs/{name}" for name in names]
    places += ["#", "#/properties/a", "#/$defs/none", "http://a/b.json", "", "#/a~2"]
    return {"$ref": draw.choice(places)}


def _object(draw: random.Random, depth: int, names: list[str]) -> Any:
    width = draw.choice((0, 1, 2, 4, 12, 40))
    keys = [draw.choice(_KEYS) if draw.random() < 0.3 else f"k{i}" for i in range(width)]
    drawn: dict[str, Any] = {"type": "object"}
    # Wide ones are flat, so that the whole stays of a size that a request may have.
    drawn["properties"] = {key: _node(draw, 0 if width > 4 else depth, names) for key in keys}
    if keys and draw.random() < 0.5:
        drawn["required"] = draw.choices([*keys, "other"], k=draw.randrange(1, len(keys) + 1))
    if draw.random() < 0.3:
        drawn["additionalProperties"] = draw.choice((True, False, _node(draw, 0, names)))
    if draw.random() < 0.1:
        drawn["minProperties"] = draw.choice(_COUNTS)
    return drawn


def _array(draw: random.Random, depth: int, names: list[str]) -> Any:
    drawn: dict[str, Any] = {"type": "array"}
    width = draw.choice((1, 1, 3, 30))
    items = [_node(draw, 0 if width > 3 else depth, names) for _ in range(width)]
    drawn[draw.choice(("items", "items", "prefixItems"))] = items if width > 1 else items[0]
    if draw.random() < 0.5:
        drawn["minItems"] = draw.choice(_COUNTS)
    if draw.random() < 0.5:
        drawn["maxItems"] = draw.choice(_COUNTS)
    return drawn


def _combination(draw: random.Random, depth: int, names: list[str]) -> Any:
    key = draw.choice(("anyOf", "oneOf", "allOf", "not", "if"))
    parts = [_node(draw, depth, names) for _ in range(draw.choice((1, 2, 3, 8)))]
    return {key: parts if key.endswith("Of") else parts[0]}


def regex(seed: int) -> str:
    """A regular expression that is large, deep, ambiguous or broken; anchored or not."""
    draw = random.Random(seed)
    body = draw.choice(_BOMBS)(draw)
    return body if draw.random() < 0.1 else f"^{body}$"


def _count(draw: random.Random) -> int:
    return draw.choice((2, 9, 30, 99, 500, 999, 2000, 10**5, 10**9))


def _nested(draw: random.Random) -> str:
    body = draw.choice(("a", "[a-z]", ".", "\\w", "(a|b)"))
    for _ in range(draw.randrange(1, 12)):
        times = ("*", "+", "?", f"{{0,{_count(draw)}}}", f"{{{_count(draw)}}}")
        body = f"({body}){draw.choice(times)}"
    return body


def _alternatives(draw: random.Random) -> str:
    parts = ["a" * draw.randrange(1, 9) + draw.choice("abc*+") for _ in range(_count(draw) % 1500)]
    times = ("*", "+", f"{{1,{_count(draw)}}}")
    return f"({'|'.join(parts)}){draw.choice(times)}"


def _row(draw: random.Random) -> str:
    part = draw.choice(("a?", "a*", "(a|aa)", ".{0,9}", "[^b]*", "(a+)+", "(.*)*"))
    return part * draw.choice((1, 20, 100, 600)) + "b"


def _deep(draw: random.Random) -> str:
    depth = draw.choice((50, 100, 101, 1000, 20_000))
    return "(" * depth + "a" + ")" * (depth - draw.randrange(2))


def _classes(draw: random.Random) -> str:
    part = draw.choice(
        ("[\\u0000-\\uffff]", "[^\\x00-\\x1f]", "[a-a]", "[z-a]", "[]", "[^]", "[日-本]")
    )
    times = ("", "*", f"{{3,{_count(draw)}}}")
    return (part + draw.choice(times)) * draw.choice((1, 9, 200))


def _unknown(draw: random.Random) -> str:
    parts = (
        "(?=a)",
        "(?<!a)",
        "(?P<n>a)(?P=n)",
        "\\1",
        "\\p{L}",
        "\\b",
        "(?i:a)",
        "a{,3}",
        "*a",
        "a**",
    )
    return "".join(draw.choices((*parts, "a", "\\d", "\\"), k=draw.randrange(1, 40)))


_BOMBS: tuple[Callable[[random.Random], str], ...] = (
    _nested,
    _nested,
    _alternatives,
    _row,
    _deep,
    _classes,
    _unknown,
)
