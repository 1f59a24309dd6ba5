"""How the text behind a flag of `kvarts-gateway` becomes a value.

Every reader raises ValueError with what is allowed; flag and text are put in front by
`gateway.flags`, the only caller.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

INT32_MAX = 2**31 - 1
# How like a known flag a word must be for that to have been meant.
_NEAR = 0.7
MAX_PORT = 65535
MAX_KEY_FILE_BYTES = 1 << 20
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_HOST_PORT = re.compile(r"(?:\[[^\[\]]+\]|[^\[\]/:\s]+):([0-9]{1,5})")
# What else gRPC resolves; the rest of such an address is its business.
_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:")
_ON = ("on", "enabled", "true", "1")
_OFF = ("off", "disabled", "false", "0")


def unknown(word: str, known: Iterable[str]) -> str:
    """What is said of a word that is no flag: the nearest one, if it was meant for one."""
    if not word.startswith("-"):
        return f"{word[:80]!r} is no flag, and belongs to none (--help lists all)"
    name = word.partition("=")[0]
    near = get_close_matches(name, [*known], 1, _NEAR)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown flag {name}{hint} (--help lists all)"


def integer(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """A decimal integer in [low, high]."""

    def read(text: str) -> int:
        if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
            raise ValueError(f"must be an integer between {low} and {high}")
        return int(text)

    return read


def number(low: float, high: float) -> Callable[[str], float]:
    """A finite number in [low, high]."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise ValueError(f"must be a number between {low:g} and {high:g}")
        return value

    return read


def choice(*allowed: str) -> Callable[[str], str]:
    """One of a few words, in any case."""

    def read(text: str) -> str:
        word = text.lower()
        if word not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return word

    return read


def truth(text: str) -> bool:
    """On or off, in the peer's four spellings of each."""
    word = text.lower()
    if word not in _ON + _OFF:
        raise ValueError(f"must be one of {', '.join(_ON + _OFF)}")
    return word in _ON


def items(text: str) -> tuple[str, ...]:
    """Comma-separated items; empty ones are dropped."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def tools(text: str) -> bool:
    """The names of tools, of which there is one."""
    found = items(text)
    if not found or not {*found} <= {"all", "get_info"}:
        raise ValueError("must be get_info or all")
    return True


def hosts(text: str) -> tuple[str, ...]:
    """At least one address to listen on."""
    found = items(text)
    if not found:
        raise ValueError("must name at least one address")
    return found


def keys(text: str) -> tuple[str, ...]:
    """At least one key: none, as of an unset shell variable, must not leave the routes open."""
    found = items(text)
    if not found:
        raise ValueError("holds no key")
    return found


def keys_of_file(name: str) -> tuple[str, ...]:
    """At least one key from a file with one a line; `#` starts a comment."""
    lines = [line.strip() for line in _read_text(name).splitlines()]
    found = tuple(line for line in lines if line and not line.startswith("#"))
    if not found:
        raise ValueError("holds no key")
    return found


def key_file(name: str) -> str:
    """A file that holds a key now."""
    keys_of_file(name)
    return name


def service_key(text: str) -> str:
    """A key that gRPC metadata can carry."""
    if not text:
        raise ValueError("holds no key")
    return header(text)


def collector(text: str) -> str:
    """The address of an OpenTelemetry collector, where its extra is installed."""
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
    except ValueError:
        is_address = False
    if not is_address:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT")
    if find_spec("opentelemetry") is None:
        raise ValueError("needs the extra otel: pip install 'kvarts[otel]'")
    return text


def header(text: str) -> str:
    """The value of a header."""
    if not text.isascii() or not text.isprintable():
        raise ValueError("must be printable ASCII")
    return text


def service_address(text: str) -> str:
    """Where gRPC finds the service."""
    if text.startswith(_SCHEMES) and not text.endswith(":"):
        return text
    match = _HOST_PORT.fullmatch(text)
    if not match or not 1 <= int(match[1]) <= MAX_PORT:
        raise ValueError(f"must be unix:/PATH or HOST:PORT with a port between 1 and {MAX_PORT}")
    return text


def prefix(text: str) -> str:
    """A path prefix without a slash at its end, or nothing."""
    found = text.rstrip("/")
    if found and not found.startswith("/"):
        raise ValueError("must start with /")
    return found


def readable_file(name: str) -> str:
    """The name of a file that can be read."""
    if not name:
        raise ValueError("must be a path")
    try:
        with open(name, "rb"):
            return name
    except OSError as error:
        raise ValueError(error.strerror) from error


def folder(name: str) -> str:
    """The name of a folder."""
    if not name or not Path(name).is_dir():
        raise ValueError("is not a folder")
    return name


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON object") from None


def _read_text(name: str) -> str:
    if not name:
        raise ValueError("must be a path")
    try:
        with open(name, "rb") as file:
            raw = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror) from error
    if len(raw) > MAX_KEY_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_KEY_FILE_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
