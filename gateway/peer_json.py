"""JSON as llama-server reads and writes it, byte for byte.

Written values keep insertion order, have no spaces, print every double in its shortest form with
the peer's thresholds for exponents, and NaN or infinity as null. Read values are plain Python
objects; what cannot be read is one typed error. This module knows neither HTTP nor any field.

Example:
    >>> write({"a": [1, 0.5], "b": None})
    b'{"a":[1,0.5],"b":null}'
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, TypeAlias, cast

import msgspec

Json: TypeAlias = "bool | int | float | str | bytes | Sequence[Json] | Mapping[str, Json] | None"

FLOAT32_MAX = 3.4028234663852886e38
_UTF8_BOM = b"\xef\xbb\xbf"
# The peer writes digits up to 10^15 in full; Python would go on to 10^16.
_FULL_DIGITS_BELOW = 1e15
_PYTHON_DIGITS_BELOW = 1e16


# An empty list of three bytes takes sixty in memory, and time at each collection of garbage.
MAX_PARTS = 1 << 19
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class UnreadableJson(ValueError):
    """A body that is not JSON, is nested too deeply, or holds a number beyond a double."""


class TooManyParts(UnreadableJson):
    """A body of more arrays and objects than memory is kept for."""


def read(body: bytes) -> Any:
    """Parses a request body.

    Raises:
        TooManyParts: it has more than `MAX_PARTS` arrays and objects.
        UnreadableJson: the text is no JSON value, or not one that a reader can hold.
    """
    if _num_brackets(body, 0, len(body)) > MAX_PARTS:
        _refuse_parts(body)
    try:
        return msgspec.json.decode(body.removeprefix(_UTF8_BOM))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UnreadableJson(f"parse error: {error}") from error


def _num_brackets(body: bytes, start: int, end: int) -> int:
    return body.count(b"[", start, end) + body.count(b"{", start, end)


def _refuse_parts(body: bytes) -> None:
    """Counts anew, without the brackets of texts."""
    num_parts = start = 0
    for string in _STRING.finditer(body):
        num_parts += _num_brackets(body, start, string.start())
        start = string.end()
        if num_parts > MAX_PARTS:
            break
    num_parts += _num_brackets(body, start, len(body))
    if num_parts > MAX_PARTS:
        raise TooManyParts(f"the body has more than {MAX_PARTS} arrays and objects")


def write(value: Json) -> bytes:
    """Writes a value as the peer does; text that is not UTF-8 becomes U+FFFD.

    Raises:
        UnreadableJson: a client's value is nested more deeply than can be written again.
    """
    parts: list[str] = []
    try:
        _append(parts, value)
    except RecursionError as error:
        raise UnreadableJson("parse error: the value is nested too deeply") from error
    return "".join(parts).encode("utf-8", "replace")


def type_name(value: object) -> str:
    """Names a JSON type as the peer's error texts do."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def format_double(value: float) -> str:
    """Prints a double: shortest digits, exponents from 1e15 up and below 1e-4, null if not finite.

    Source: the peer's JSON library, whose limits are 15 digits and -4.
    """
    if not math.isfinite(value):
        return "null"
    text = float.__repr__(value)
    if not _FULL_DIGITS_BELOW <= abs(value) < _PYTHON_DIGITS_BELOW:
        return text
    digits = text.removeprefix("-").removesuffix(".0").replace(".", "")
    fraction = digits[1:].rstrip("0")
    mantissa = f"{digits[0]}.{fraction}" if fraction else digits[0]
    return f"{'-' if value < 0 else ''}{mantissa}e+15"


def to_float32(value: int | float) -> float:
    """Rounds to single precision and widens back, the form in which the peer echoes parameters.

    A value beyond the range becomes the largest of its sign.
    """
    if abs(value) > FLOAT32_MAX:
        return -FLOAT32_MAX if value < 0 else FLOAT32_MAX
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _append(parts: list[str], value: Json) -> None:
    scalar = _SCALARS.get(type(value))
    if scalar is not None:
        parts.append(scalar(value))
        return
    match value:
        case str() | int() | float():  # of a class of its own, an enumeration's say
            base = next(kind for kind in type(value).__mro__ if kind in _SCALARS)
            parts.append(_SCALARS[base](value))
        case bytes():
            parts.append(encode_basestring(value.decode("utf-8", "replace")))
        case dict() | Mapping():  # the first is known much sooner
            _append_object(parts, value)
        case _:
            _append_array(parts, cast("Sequence[Json]", value))


def _append_object(parts: list[str], value: Mapping[str, Json]) -> None:
    separator = "{"
    for key, item in value.items():
        parts.append(f"{separator}{encode_basestring(key)}:")
        _append(parts, item)
        separator = ","
    parts.append("}" if value else "{}")


def _append_array(parts: list[str], value: Sequence[Json]) -> None:
    separator = "["
    for item in value:
        parts.append(separator)
        _append(parts, item)
        separator = ","
    parts.append("]" if value else "[]")


# Looked up by type: most of what is written is one of these, and a chain of checks costs more than
# writing does. `encode_basestring` is what `json.dumps` comes to; that makes an encoder for each.
_SCALARS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring,
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    int: int.__repr__,
    float: format_double,
}
