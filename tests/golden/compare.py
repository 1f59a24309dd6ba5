"""Whether an answer equals a recorded one, by the rules that the recordings come with.

Same keys in the same order, same types, lengths, strings and integers. Floats that the model
computed have tolerances; values that are volatile or near a tie are compared by shape only. Reused
prompt tokens may exceed the recording's where the sums agree.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

_PROBABILITY_KEYS = frozenset({"logprob", "prob"})
_CACHE_KEYS = frozenset({"cache_n", "cached_tokens", "cache", "cache_read_input_tokens"})

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Tolerances:
    """How far computed floats may be off. Embeddings are relative to the largest component."""

    probability: float = 1e-3
    embedding: float = 1e-3


@dataclass(frozen=True)
class Rules:
    """What one exchange allows: path patterns such as `response.choices[*].id`."""

    volatile: Sequence[str] = ()
    sensitive: Sequence[str] = ()
    tolerances: Tolerances = Tolerances()
    allows_more_cached: bool = True

    def is_volatile(self, path: Path) -> bool:
        """Whether the value may differ while its type may not."""
        return any(_matches(pattern, path) for pattern in self.volatile)

    def is_sensitive(self, path: Path) -> bool:
        """Whether the value, or one above it, is near a tie: its shape alone counts."""
        return any(
            _matches(pattern, path[:length])
            for pattern in self.sensitive
            for length in range(1, len(path) + 1)
        )


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a JSON value is an object."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a JSON value is a list."""
    return isinstance(value, list)


def differences(expected: Any, actual: Any, rules: Rules, root: str) -> list[str]:
    """Lists every difference below `root`, which is `response`, `sse` or `metrics`."""
    return list(_differences(expected, actual, rules, (root,)))


def format_path(path: Path) -> str:
    """A path as the recordings write it."""
    text = str(path[0])
    for part in path[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text


def num_ids(value: Any) -> dict[str, int]:
    """How many different texts each `id` has, by its path with every index as `[*]`.

    An answer that repeats one id throughout must not turn into one with several.
    """
    found: dict[str, set[str]] = {}
    for path, item in _walk(value, ("$",)):
        if path[-1] == "id" and isinstance(item, str):
            place = format_path(tuple("[*]" if isinstance(part, int) else part for part in path))
            found.setdefault(place, set()).add(item)
    return {place: len(ids) for place, ids in found.items()}


def _differences(expected: Any, actual: Any, rules: Rules, path: Path) -> Iterator[str]:
    where = format_path(path)
    if rules.is_sensitive(path):
        if _shape(expected) != _shape(actual):
            yield f"{where}: shape {_shape(actual)} instead of {_shape(expected)}"
        return
    if _type(expected) != _type(actual):
        yield f"{where}: {_short(actual)} instead of {_short(expected)}"
    elif is_object(expected):
        yield from _object_differences(expected, actual, rules, path)
    elif is_list(expected):
        yield from _list_differences(expected, actual, rules, path)
    elif not rules.is_volatile(path) and not _is_equal(expected, actual, rules, path):
        yield f"{where}: {_short(actual)} instead of {_short(expected)}"


def _object_differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], rules: Rules, path: Path
) -> Iterator[str]:
    if list(expected) != list(actual):
        yield f"{format_path(path)}: keys {list(actual)} instead of {list(expected)}"
        return
    if "cache_n" in expected and _prompt_tokens(expected) != _prompt_tokens(actual):
        yield (
            f"{format_path(path)}: {_prompt_tokens(actual)} prompt tokens instead of "
            f"{_prompt_tokens(expected)}"
        )
    for key, value in expected.items():
        yield from _differences(value, actual[key], rules, (*path, key))


def _prompt_tokens(timings: Mapping[str, Any]) -> Any:
    return timings["cache_n"] + timings["prompt_n"]


def _list_differences(
    expected: list[Any], actual: list[Any], rules: Rules, path: Path
) -> Iterator[str]:
    if len(expected) != len(actual):
        yield (
            f"{format_path(path)}: {len(actual)} items instead of {len(expected)}: "
            f"{_short(actual)} instead of {_short(expected)}"
        )
        return
    if "embedding" in path[-2:] and expected and isinstance(expected[0], float):
        yield from _embedding_differences(expected, actual, rules, path)
        return
    for index, value in enumerate(expected):
        yield from _differences(value, actual[index], rules, (*path, index))


def _embedding_differences(
    expected: Sequence[float], actual: Sequence[float], rules: Rules, path: Path
) -> Iterator[str]:
    allowed = rules.tolerances.embedding * max(abs(value) for value in expected)
    worst = max(abs(a - b) for a, b in zip(expected, actual, strict=True))
    if not worst <= allowed:
        yield f"{format_path(path)}: off by {worst:g}, allowed {allowed:g}"


def _is_equal(expected: Any, actual: Any, rules: Rules, path: Path) -> bool:
    key = path[-1]
    if isinstance(expected, float) and key in _PROBABILITY_KEYS:
        return _is_close_probability(expected, actual, rules.tolerances.probability)
    if key == "embedding" and isinstance(expected, str):
        return not list(_embedding_differences(_decode(expected), _decode(actual), rules, path))
    if rules.allows_more_cached and key in _CACHE_KEYS:
        return actual >= expected
    if rules.allows_more_cached and key == "prompt_n":
        # Its sum with the cached tokens is compared where both are known.
        return actual <= expected
    if rules.allows_more_cached and key == "processed":
        return actual >= expected
    return expected == actual


def _is_close_probability(expected: float, actual: float, allowed: float) -> bool:
    return expected == actual or math.isclose(expected, actual, rel_tol=0.0, abs_tol=allowed)


def _decode(text: str) -> tuple[float, ...]:
    data = base64.b64decode(text)
    return struct.unpack(f"<{len(data) // 4}f", data)


def _matches(pattern: str, path: Path) -> bool:
    return _compiled(pattern).fullmatch(format_path(path)) is not None


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(re.escape("[*]"), r"\[\d+\]"))


def _walk(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    yield path, value
    if is_object(value):
        for key, item in value.items():
            yield from _walk(item, (*path, key))
    elif is_list(value):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, index))


def _type(value: Any) -> str:
    return type(value).__name__


def _shape(value: Any) -> Any:
    if is_object(value):
        return {key: _shape(item) for key, item in value.items()}
    if is_list(value):
        # Bytes of a token and lists of candidates follow the text.
        return ["list"]
    return _type(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
