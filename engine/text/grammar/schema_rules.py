"""The named rules of a grammar that is being written, and the texts that they are made of.

Source: llama.cpp `common_chat_schema_converter`, whose names and words these are, since clients
see the grammar in their answers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

SPACE = '| " " | "\\n"{1,2} [ \\t]{0,20}'


@dataclass(frozen=True)
class _Builtin:
    text: str
    needs: tuple[str, ...] = ()


_VALUE_KINDS = ("object", "array", "string", "number", "boolean", "null")
_HEX = "[0-9a-fA-F]"
_BUILTINS: Mapping[str, _Builtin] = {
    "boolean": _Builtin('("true" | "false")'),
    "decimal-part": _Builtin("[0-9]{1,16}"),
    "integral-part": _Builtin("[0] | [1-9] [0-9]{0,15}"),
    "number": _Builtin(
        '("-"? integral-part) ("." decimal-part)? ([eE] [-+]? integral-part)?',
        ("integral-part", "decimal-part"),
    ),
    "integer": _Builtin('("-"? integral-part)', ("integral-part",)),
    "value": _Builtin(" | ".join(_VALUE_KINDS), _VALUE_KINDS),
    "object": _Builtin(
        '"{" space ( string ":" space value ("," space string ":" space value)* )? space "}"',
        ("string", "value"),
    ),
    "array": _Builtin('"[" space ( value ("," space value)* )? space "]"', ("value",)),
    "uuid": _Builtin(
        f'"\\"" {_HEX}{{8}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{4}} "-" {_HEX}{{12}} "\\""'
    ),
    "char": _Builtin('[^"\\\\\\x7F\\x00-\\x1F] | [\\\\] (["\\\\bfnrt] | "u" [0-9a-fA-F]{4})'),
    "string": _Builtin('"\\"" char* "\\""', ("char",)),
    "null": _Builtin('"null"'),
    "date": _Builtin(
        '[0-9]{4} "-" ( "0" [1-9] | "1" [0-2] ) "-" ( "0" [1-9] | [1-2] [0-9] | "3" [0-1] )'
    ),
    "time": _Builtin(
        '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ( "." [0-9]{3} )? '
        '( "Z" | ( "+" | "-" ) ( [01] [0-9] | "2" [0-3] ) ":" [0-5] [0-9] )'
    ),
    "date-time": _Builtin('date "T" time', ("date", "time")),
    "date-string": _Builtin('"\\"" date "\\""', ("date",)),
    "time-string": _Builtin('"\\"" time "\\""', ("time",)),
    "date-time-string": _Builtin('"\\"" date-time "\\""', ("date-time",)),
}
RESERVED = frozenset({"root", *_BUILTINS})
_BAD_NAME_CHARS = re.compile("[^a-zA-Z0-9-]+")
_LITERAL_ESCAPES = str.maketrans({"\r": "\\r", "\n": "\\n", '"': '\\"', "\\": "\\\\"})


class Rules:
    """Rules by name; a name that is taken by another text gets a number."""

    def __init__(self) -> None:
        self._texts = {"space": SPACE}

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    def add(self, name: str, text: str) -> str:
        """Adds a rule and returns the name that it got."""
        clean = _BAD_NAME_CHARS.sub("-", name)
        if self._texts.setdefault(clean, text) == text:
            return clean
        number = 0
        while self._texts.setdefault(f"{clean}{number}", text) != text:
            number += 1
        return f"{clean}{number}"

    def add_builtin(self, kind: str, name: str | None = None) -> str:
        """Adds one of the fixed rules, under its own name or another, and all that it needs."""
        builtin = _BUILTINS[kind]
        added = self.add(name or kind, builtin.text)
        for needed in builtin.needs:
            if needed not in self._texts:
                self.add_builtin(needed)
        return added

    def mark(self) -> int:
        """Returns a place to go back to."""
        return len(self._texts)

    def undo(self, mark: int) -> None:
        """Takes away what was added since a mark."""
        while len(self._texts) > mark:
            self._texts.popitem()

    def write(self) -> str:
        """Returns the grammar, rules sorted by name."""
        return "".join(f"{name} ::= {text}\n" for name, text in sorted(self._texts.items()))


def reference_name(ref: str) -> str:
    """The name of the rule that a reference's target becomes."""
    return "ref" + _BAD_NAME_CHARS.sub("-", ref.partition("#")[2])


def literal(text: str) -> str:
    """Returns the literal that matches a text."""
    return f'"{text.translate(_LITERAL_ESCAPES)}"'


def constant(value: Any) -> str:
    """Returns the literal that matches a JSON value in its shortest form."""
    return literal(compact_json(value))


def class_char(code: int) -> str:
    """Returns a character as it stands in a class, by its number where it would mean something."""
    char = chr(code)
    if char in "-]^[\\" or not char.isprintable():
        return (
            f"\\U{code:08X}"
            if code > 0xFFFF
            else f"\\u{code:04X}"
            if code > 0xFF
            else f"\\x{code:02X}"
        )
    return char


def repetition(item: str, low: int, high: int | None, separator: str = "") -> str:
    """Returns what matches an item several times, something between each two."""
    if high == 0:
        return ""
    if low == 0 and high == 1:
        return f"{item}?"
    if separator:
        rest_high = None if high is None else high - 1
        rest = repetition(f"({separator} {item})", max(0, low - 1), rest_high)
        text = f"{item} {rest}"
        return f"({text})?" if low == 0 else text
    if high is None and low <= 1:
        return f"{item}+" if low else f"{item}*"
    return f"{item}{{{low},{'' if high is None else high}}}"


def compact_json(value: Any) -> str:
    """Writes JSON as the peer does: no spaces, characters as they are, members in order."""
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, list):
        return f"[{','.join(map(compact_json, cast('list[Any]', value)))}]"
    if isinstance(value, dict):
        members = (
            f"{json.dumps(key, ensure_ascii=False)}:{compact_json(member)}"
            for key, member in cast("dict[str, Any]", value).items()
        )
        return f"{{{','.join(members)}}}"
    return json.dumps(value, ensure_ascii=False)


def _float(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    if 1e15 <= abs(value) < 1e16:
        # The peer's shortest form changes to an exponent one power of ten before Python's.
        digits = repr(int(value)).rstrip("0").lstrip("-")
        sign = "-" if value < 0 else ""
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e+15"
    return repr(value)
