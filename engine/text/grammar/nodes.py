"""A parsed grammar: rules over characters and tokens. Frozen, no behaviour but construction.

Knows no syntax and no matcher. Characters are Unicode scalar values but U+0000.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Interval = tuple[int, int]

_LAST = 0x10FFFF
# No text that can be sent holds these: a surrogate is no character, and NUL ends a text in C.
_EXCLUDED = ((0, 0), (0xD800, 0xDFFF), (_LAST + 1, 2**32 - 1))


@dataclass(frozen=True)
class Chars:
    """One character of a set: intervals, ends included, rising and apart. May be empty."""

    intervals: tuple[Interval, ...]

    @classmethod
    def of(cls, intervals: Iterable[Interval], *, negated: bool = False) -> Chars:
        """Makes a set of any intervals, or of all characters outside them."""
        merged = _merged(intervals)
        if negated:
            return cls(_without(((0, _LAST),), (*merged, *_EXCLUDED)))
        return cls(_without(merged, _EXCLUDED))

    def intersect(self, other: Chars) -> Chars:
        """Returns the characters of both sets."""
        return Chars(_without(self.intervals, _without(((0, _LAST),), other.intervals)))


@dataclass(frozen=True)
class Literal:
    """Characters one after another; not empty."""

    text: str


@dataclass(frozen=True)
class TokenIs:
    """One token of the vocabulary, or any but it; whatever its text is."""

    token_id: int
    is_negated: bool = False


@dataclass(frozen=True)
class Ref:
    """What a rule matches."""

    name: str


@dataclass(frozen=True)
class Repeat:
    """An item `low` to `high` times; `high` None is without end."""

    item: Item
    low: int
    high: int | None


@dataclass(frozen=True)
class Choice:
    """One of several sequences; a sequence of nothing matches the empty text."""

    alternatives: tuple[tuple[Item, ...], ...]


Item = Chars | Literal | TokenIs | Ref | Repeat | Choice


@dataclass(frozen=True)
class Grammar:
    """Rules by name, "root" among them; every name that is referred to is there.

    `lines` is where each rule begins, from 1.
    """

    rules: Mapping[str, Choice]
    lines: Mapping[str, int]


def _merged(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    result: list[Interval] = []
    for low, high in sorted(pair for pair in intervals if pair[0] <= pair[1]):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def _without(kept: Iterable[Interval], removed: Iterable[Interval]) -> tuple[Interval, ...]:
    gaps = _merged(removed)
    result: list[Interval] = []
    for begin, end in kept:
        low = begin
        for first, last in gaps:
            if last < low or first > end:
                continue
            if first > low:
                result.append((low, first - 1))
            low = last + 1
        if low <= end:
            result.append((low, end))
    return tuple(result)


ANY_CHAR = Chars.of((), negated=True)
