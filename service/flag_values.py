"""How the text after a flag becomes a value: one `Kind` per shape of value, each with its limits.

A kind knows neither a flag's name nor where its text came from; it raises `BadValue`, whose
message says what is allowed, and the caller puts name and text in front.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from engine.requests import Sampler

INT32_MAX = 2**31 - 1
ON_WORDS = frozenset({"on", "enabled", "true", "1"})
OFF_WORDS = frozenset({"off", "disabled", "false", "0"})
_AUTO_WORDS = frozenset({"auto", "-1"})
_WEB_PATH = re.compile(r"[A-Za-z0-9._~:/-]{1,255}")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_LOGIT_BIAS = re.compile(r"\s*([0-9]{1,10})\s*([+-])\s*(\S+)\s*")

# Letters of --sampler-seq. Source: llama.cpp, common_sampler_type_to_chr.
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
_SAMPLER_LETTERS = {
    "e": Sampler.PENALTIES,
    "d": Sampler.DRY,
    "s": Sampler.TOP_N_SIGMA,
    "k": Sampler.TOP_K,
    "y": Sampler.TYPICAL_P,
    "p": Sampler.TOP_P,
    "m": Sampler.MIN_P,
    "x": Sampler.XTC,
    "t": Sampler.TEMPERATURE,
    "i": Sampler.INFILL,
    "a": Sampler.ADAPTIVE_P,
}
_SAMPLER_NICKNAMES = {
    "nucleus": Sampler.TOP_P,
    "temp": Sampler.TEMPERATURE,
    "typ": Sampler.TYPICAL_P,
}


class BadValue(ValueError):
    """The text is not a value of its kind; the message says what would be."""


@dataclass(frozen=True)
class Kind:
    """A shape of value: what help shows in its place, and how its text is read.

    `takes_value` False is a switch: it stands alone on the command line, and `parse` reads only
    the text of variables and files.
    """

    metavar: str
    parse: Callable[[str], Any]
    takes_value: bool = True


def _parse_switch(text: str) -> bool:
    word = text.lower()
    if word in ON_WORDS:
        return True
    if word in OFF_WORDS:
        return False
    raise BadValue("must be one of on, off, enabled, disabled, true, false, 1, 0")


SWITCH = Kind("", _parse_switch, takes_value=False)
TEXT = Kind("TEXT", str)


def path(metavar: str = "FILE") -> Kind:
    """A file or folder name, not looked at here."""

    def parse(text: str) -> str:
        if not text or "\0" in text:
            raise BadValue("must be a path")
        return text

    return Kind(metavar, parse)


def web_address() -> Kind:
    """`http://HOST:PORT` or `https://HOST:PORT`."""

    def parse(text: str) -> str:
        try:
            parts = urlsplit(text)
            is_one = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
        except ValueError:
            is_one = False
        if not is_one:
            raise BadValue("must be http://HOST:PORT or https://HOST:PORT")
        return text

    return Kind("URL", parse)


def web_path() -> Kind:
    """The path of a route; a slash in front may be left out."""

    def parse(text: str) -> str:
        if not _WEB_PATH.fullmatch(text):
            raise BadValue("must be a path of A-Z a-z 0-9 . _ ~ : - and /")
        return "/" + text.lstrip("/")

    return Kind("PATH", parse)


def integer(low: int, high: int = INT32_MAX, *, but_not: int | None = None) -> Kind:
    """A decimal integer in [low, high]; `but_not` is a hole in that range."""
    hole = "" if but_not is None else f", but not {but_not}"

    def parse(text: str) -> int:
        if not _INTEGER.fullmatch(text):
            raise BadValue(f"must be an integer between {low} and {high}{hole}")
        value = int(text)
        if not low <= value <= high or value == but_not:
            raise BadValue(f"must be between {low} and {high}{hole}")
        return value

    return Kind("N", parse)


def number(low: float = -math.inf, high: float = math.inf, *, clamp: bool = False) -> Kind:
    """A finite number in [low, high]; with `clamp` it is moved there, as the peer does."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise BadValue("must be a number") from None
        if not math.isfinite(value):
            raise BadValue("must be a finite number")
        if clamp:
            value = min(max(value, low), high)
        if abs(value) > _MAX_FLOAT32:
            raise BadValue("must be a number of 32 bits")
        if not low <= value <= high:
            is_open = high == math.inf
            limit = f"at least {low:g}" if is_open else f"between {low:g} and {high:g}"
            raise BadValue(f"must be {limit}")
        return value

    return Kind("X", parse)


def positive_number() -> Kind:
    """A finite number above 0 whose inverse is finite too."""

    def parse(text: str) -> float:
        value = number().parse(text)
        if value <= 0 or not math.isfinite(1 / value):
            raise BadValue("must be greater than 0")
        return value

    return Kind("X", parse)


def choice(*allowed: str) -> Kind:
    """One of a few words, in any case."""

    def parse(text: str) -> str:
        word = text.lower()
        if word not in allowed:
            raise BadValue(f"must be one of {', '.join(allowed)}")
        return word

    return Kind("{" + ",".join(allowed) + "}", parse)


def maybe() -> Kind:
    """On or off, or `auto`, which is None."""

    def parse(text: str) -> bool | None:
        if text.lower() in _AUTO_WORDS:
            return None
        try:
            return SWITCH.parse(text)
        except BadValue:
            raise BadValue("must be on, off or auto") from None

    return Kind("{on,off,auto}", parse)


def comma_list(metavar: str = "A,B") -> Kind:
    """Comma-separated items, `"` quotes one that holds a comma; empty items are dropped."""

    def parse(text: str) -> tuple[str, ...]:
        try:
            (row,) = list(csv.reader([text], strict=False)) or [[]]
        except (csv.Error, ValueError):
            raise BadValue("must be a comma-separated list on one line") from None
        return tuple(item.strip() for item in row if item.strip())

    return Kind(metavar, parse)


def _parse_tools(text: str) -> tuple[str, ...]:
    names = comma_list().parse(text)
    if not names:
        raise BadValue("must be get_info or all")
    for name in names:
        if name not in ("all", "get_info"):
            raise BadValue(
                f"{name!r} is not here, only get_info is (and all, which means it): what reads or "
                "writes files or runs programs belongs into the client"
            )
    return names


TOOLS = Kind("{get_info,all}", _parse_tools)


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadValue("must be a JSON object") from None
    if not isinstance(value, dict):
        raise BadValue("must be a JSON object")
    return cast("dict[str, Any]", value)


JSON_OBJECT = Kind("JSON", _parse_json_object)


def _parse_seed(text: str) -> int | None:
    value = integer(-1, 2**32 - 1).parse(text)
    return None if value in (-1, 2**32 - 1) else value


SEED = Kind("N", _parse_seed)


def _parse_logit_bias(text: str) -> tuple[int, float]:
    match = _LOGIT_BIAS.fullmatch(text)
    if not match:
        raise BadValue("must be TOKEN_ID followed by + or - and a bias, like 15043+1")
    token_id = integer(0).parse(match[1])
    try:
        bias = float(match[3])
    except ValueError:
        raise BadValue("must end in a number after the sign, like 15043-0.5") from None
    if math.isnan(bias):
        raise BadValue("must not have a bias that is not a number")
    return token_id, bias if match[2] == "+" else -bias


LOGIT_BIAS = Kind("ID+BIAS", _parse_logit_bias)


def sampler_by_name(name: str) -> Sampler | None:
    """Finds a sampler by any of llama.cpp's spellings (`top_k`, `top-k`, `topk`, `nucleus`).

    Source: llama.cpp, common_sampler_types_from_names.
    """
    wanted = name.strip().lower()
    for sampler in Sampler:
        canonical = sampler.value
        if wanted in (canonical, canonical.replace("_", "-"), canonical.replace("_", "")):
            return sampler
    return _SAMPLER_NICKNAMES.get(wanted)


def _parse_samplers(text: str) -> tuple[Sampler, ...]:
    found: list[Sampler] = []
    for name in filter(None, text.split(";")):
        sampler = sampler_by_name(name)
        if sampler is None:
            known = ", ".join(s.value for s in Sampler)
            raise BadValue(f"{name!r} is no sampler; known are {known}")
        found.append(sampler)
    return tuple(found)


SAMPLERS = Kind("A;B", _parse_samplers)


def _parse_sampler_letters(text: str) -> tuple[Sampler, ...]:
    unknown = [letter for letter in text if letter not in _SAMPLER_LETTERS]
    if unknown:
        raise BadValue(f"{unknown[0]!r} is no sampler; letters are {''.join(_SAMPLER_LETTERS)}")
    return tuple(_SAMPLER_LETTERS[letter] for letter in text)


SAMPLER_LETTERS = Kind("LETTERS", _parse_sampler_letters)


def unescape(text: str) -> str:
    r"""Replaces `\n \r \t \' \" \\ \xHH` and leaves any other backslash as it is.

    `\xHH` is a byte, so several may spell one UTF-8 character.

    Raises:
        BadValue: the bytes are not UTF-8.

    Source: llama.cpp, string_process_escapes.
    """
    named = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}

    def replace(match: re.Match[bytes]) -> bytes:
        body = match[1]
        return bytes([int(body[1:], 16)]) if body[:1] == b"x" else named[body]

    raw = re.sub(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])", replace, text.encode())
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadValue("must be UTF-8 after its escapes are replaced") from None
