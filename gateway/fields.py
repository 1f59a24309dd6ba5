"""How one field of a completion body is read: the peer's conversions, clamps and limits.

Each kind turns a JSON value into a parameter or raises `Refusal` with the peer's words; `schema`
lists which field is of which kind. A field never sees null: null means absent. This module knows
no field by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gateway.errors import wrong_type
from gateway.peer_json import FLOAT32_MAX, to_float32

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


class Refusal(ValueError):
    """A value that a field does not take; the message does not name the field."""


class Kind(Protocol):
    """A conversion of a JSON value that is not null."""

    def read(self, value: Any) -> Any:
        """Converts the value.

        Raises:
            Refusal: the value is of a wrong type or beyond a hard limit.
        """
        ...


@dataclass(frozen=True)
class Flag:
    """A boolean; numbers are refused."""

    def read(self, value: Any) -> bool:
        """Takes true and false only."""
        if not isinstance(value, bool):
            raise Refusal(wrong_type("boolean", value))
        return value


@dataclass(frozen=True)
class Integer:
    """A whole number within inclusive bounds; a fraction is cut off.

    Soft bounds clamp, hard ones refuse. The peer takes a boolean for a number wherever its own
    variable is narrower than 64 bits.
    """

    low: int = -INT32_MAX - 1
    high: int = INT32_MAX
    is_hard: bool = False
    takes_boolean: bool = True

    def read(self, value: Any) -> int:
        """Truncates towards zero, then applies the bounds."""
        number = int(_number(value, takes_boolean=self.takes_boolean))
        if self.is_hard and not self.low <= number <= self.high:
            raise Refusal(
                f"Value must be between {self.low} <= value <= {self.high}, but got {number}"
            )
        return max(self.low, min(self.high, number))


@dataclass(frozen=True)
class Unsigned32:
    """A seed: any whole number, modulo 2**32, so that -1 means 4294967295."""

    def read(self, value: Any) -> int:
        """Truncates towards zero, then wraps."""
        return int(_number(value, takes_boolean=True)) % 2**32


@dataclass(frozen=True)
class Float32:
    """A single-precision number within inclusive bounds."""

    low: float = -FLOAT32_MAX
    high: float = FLOAT32_MAX
    is_hard: bool = False

    def read(self, value: Any) -> float:
        """Rounds to single precision, then applies the bounds."""
        number = to_float32(_number(value, takes_boolean=True))
        low, high = to_float32(self.low), to_float32(self.high)
        if self.is_hard and not low <= number <= high:
            raise Refusal(f"Value must be between {low:f} <= value <= {high:f}, but got {number:f}")
        return max(low, min(high, number))


@dataclass(frozen=True)
class Text:
    """A string."""

    def read(self, value: Any) -> str:
        """Takes strings only."""
        if not isinstance(value, str):
            raise Refusal(wrong_type("string", value))
        return value


@dataclass(frozen=True)
class LenientText:
    """A string; anything else reads as empty."""

    def read(self, value: Any) -> str:
        """Never refuses."""
        return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class LenientTexts:
    """A list of strings; anything else reads as empty."""

    def read(self, value: Any) -> tuple[str, ...]:
        """Never refuses."""
        return strings_or_none(value) or ()


@dataclass(frozen=True)
class Texts:
    """A list of strings, or one string."""

    def read(self, value: Any) -> tuple[str, ...]:
        """Refuses an item that is no string."""
        return tuple(Text().read(item) for item in items_of(value))


@dataclass(frozen=True)
class Breakers:
    """DRY's sequence breakers: a list of at least one string."""

    def read(self, value: Any) -> tuple[str, ...]:
        """Refuses an empty list and every other shape alike."""
        breakers = strings_or_none(value)
        if not breakers:
            raise Refusal("Error: dry_sequence_breakers must be a non-empty array of strings")
        return breakers


@dataclass(frozen=True)
class Stops:
    """Stop strings: a string or a list; empty where the value names none."""

    def read(self, value: Any) -> tuple[str, ...]:
        """Skips what the peer finds empty (null, {} and []) and ignores other top-level types."""
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list):
            return ()
        items = cast("list[Any]", value)
        return tuple(Text().read(item) for item in items if item not in (None, [], {}))


_NO_ADAPTER = -1
# Far more than can be loaded; each costs time in which nobody else is answered.
_MAX_ADAPTER_ENTRIES = 4096


@dataclass(frozen=True)
class Adapters:
    """LoRA weights: a list of `{id, scale}`; what is malformed inside an entry reads as absent."""

    def read(self, value: Any) -> tuple[tuple[int, float], ...]:
        """Returns (id, scale) by rising id; the last entry of an id wins. No adapter has what is no id.

        A list that names none is still a set, in which all are off: it is of no id.

        Source: the peer's request form, where -1 stands for no id and 0 for no scale.
        """
        if not isinstance(value, list):
            raise Refusal("Error: 'lora' must be an array of objects with 'id' and 'scale' fields")
        entries = cast("list[Any]", value)
        if len(entries) > _MAX_ADAPTER_ENTRIES:
            raise Refusal(
                f"Error: 'lora' has {len(entries)} entries, at most {_MAX_ADAPTER_ENTRIES} are taken"
            )
        scales: dict[int, float] = {}
        for entry in entries:
            if not isinstance(entry, Mapping):
                continue
            members = cast("Mapping[str, Any]", entry)
            adapter_id = lenient_integer(members.get("id"), _NO_ADAPTER)
            if 0 <= adapter_id <= INT32_MAX:
                scales[adapter_id] = _lenient_float32(members.get("scale"), 0.0)
        if entries and not scales:
            scales[_NO_ADAPTER] = 0.0
        return tuple(sorted(scales.items()))


@dataclass(frozen=True)
class Bias:
    """Logit biases by token id or by text; bad entries are skipped."""

    def read(self, value: Any) -> tuple[tuple[int | str, float], ...]:
        """Returns (token id or text, bias) in order; `false` is -inf."""
        if isinstance(value, list):
            pairs = _pairs(cast("list[Any]", value))
        elif isinstance(value, Mapping):
            members = cast("Mapping[str, Any]", value)
            pairs = [(_id_or_text(key), bias) for key, bias in members.items()]
        else:
            return ()
        read = ((target, _bias(bias)) for target, bias in pairs)
        return tuple((target, bias) for target, bias in read if bias is not None)


@dataclass(frozen=True)
class Trigger:
    """What switches a lazy grammar on. `kind` is the peer's number; `token` belongs to TOKEN."""

    kind: int
    value: str
    token: int | None = None


TRIGGER_TOKEN, TRIGGER_WORD, TRIGGER_PATTERN, TRIGGER_FULL_PATTERN = range(4)


@dataclass(frozen=True)
class Triggers:
    """A list of objects `{type, value, token?}`."""

    def read(self, value: Any) -> tuple[Trigger, ...]:
        """Refuses a malformed entry; a type that there is not would end the peer."""
        return tuple(_trigger(entry) for entry in items_of(value))


def lenient_integer(value: Any, default: int) -> int:
    """A number or boolean as an integer, anything else as the default."""
    if not isinstance(value, int | float):
        return default
    return int(_number(value, takes_boolean=True))


def lenient_flag(value: Any, default: bool) -> bool:
    """A boolean as it is, anything else as the default."""
    return value if isinstance(value, bool) else default


def strings_or_none(value: Any) -> tuple[str, ...] | None:
    """A list of strings as a tuple; None for every other shape."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    if not all(isinstance(item, str) for item in items):
        return None
    return tuple(cast("list[str]", items))


def members_of(value: Any) -> Mapping[str, Any]:
    """An object's members; any other value has none."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def items_of(value: Any) -> Sequence[Any]:
    """What the peer iterates over: a list's items, an object's values, a scalar itself."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    if isinstance(value, Mapping):
        return list(cast("Mapping[str, Any]", value).values())
    return [value]


def _number(value: Any, *, takes_boolean: bool) -> int | float:
    if not isinstance(value, int | float) or (isinstance(value, bool) and not takes_boolean):
        raise Refusal(wrong_type("number", value))
    return value


def _lenient_float32(value: Any, default: float) -> float:
    return to_float32(value) if isinstance(value, int | float) else default


def _pairs(items: Sequence[Any]) -> list[tuple[int | str, Any]]:
    pairs: list[tuple[int | str, Any]] = []
    for item in items:
        if not isinstance(item, list):
            continue
        members = cast("list[Any]", item)
        if len(members) != 2:
            continue
        target = members[0]
        is_id = isinstance(target, int) and not isinstance(target, bool)
        if is_id or isinstance(target, str):
            pairs.append((target, members[1]))
    return pairs


def _id_or_text(key: str) -> int | str:
    digits = key.removeprefix("-").removeprefix("+")
    return int(key) if digits.isascii() and digits.isdigit() and len(key) <= 20 else key


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return to_float32(value)


def _trigger(entry: Any) -> Trigger:
    members = members_of(entry)
    for key in ("type", "value"):
        if key not in members:
            raise Refusal(f"key '{key}' not found")
    kind = int(_number(members["type"], takes_boolean=True))
    if not TRIGGER_TOKEN <= kind <= TRIGGER_FULL_PATTERN:
        raise Refusal(f"there is no trigger of type {kind}")
    text = Text().read(members["value"])
    if kind != TRIGGER_TOKEN:
        return Trigger(kind, text)
    if "token" not in members:
        raise Refusal("key 'token' not found")
    return Trigger(kind, text, int(_number(members["token"], takes_boolean=True)))
