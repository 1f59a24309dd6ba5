"""A JSON schema as the grammar converter sees it. Frozen, no behaviour. Knows no JSON text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AnyValue:
    """Any JSON value."""


@dataclass(frozen=True)
class Primitive:
    """A null, a boolean, or a number without bounds; `kind` is the JSON type's name."""

    kind: str


@dataclass(frozen=True)
class Reference:
    """What another place of the document describes."""

    ref: str


@dataclass(frozen=True)
class AnyOf:
    """Any of several."""

    alternatives: tuple[Schema, ...]


@dataclass(frozen=True)
class AllOf:
    """All of several at once, as far as the peer merges them."""

    parts: tuple[Schema, ...]


@dataclass(frozen=True)
class OneValueOf:
    """Given values; `is_const` where the schema gives one by `const`."""

    values: tuple[Any, ...]
    is_const: bool = False


@dataclass(frozen=True)
class IntegerRange:
    """A whole number, ends included; None is no end."""

    low: int | None
    high: int | None


@dataclass(frozen=True)
class Text:
    """A string. The first of pattern, format and length that is given decides, as in the peer.

    `format` is "uuid", "date", "time", "date-time" or "". `high` None is without end.
    """

    pattern: str
    format: str
    low: int
    high: int | None
    path: str


@dataclass(frozen=True)
class List:
    """An array of like items; `high` None is without end."""

    items: Schema
    low: int
    high: int | None


@dataclass(frozen=True)
class Tuple:
    """An array of exactly these items."""

    items: tuple[Schema, ...]


@dataclass(frozen=True)
class Property:
    """A member of an object."""

    name: str
    schema: Schema
    is_required: bool


@dataclass(frozen=True)
class Object:
    """An object with these members in this order; `additional` None allows no others."""

    properties: tuple[Property, ...]
    additional: Schema | None


Schema = (
    AnyValue
    | Primitive
    | Reference
    | AnyOf
    | AllOf
    | OneValueOf
    | IntegerRange
    | Text
    | List
    | Tuple
    | Object
)


@dataclass(frozen=True)
class Ignored:
    """A keyword that the converter does not honour. `path` is a JSON pointer behind #."""

    path: str
    keyword: str

    def __str__(self) -> str:
        return f"{self.keyword} at {self.path}"


@dataclass(frozen=True)
class Document:
    """A whole schema: its root, what its references mean, and what was passed over."""

    root: Schema
    targets: dict[str, Schema]
    ignored: tuple[Ignored, ...]
