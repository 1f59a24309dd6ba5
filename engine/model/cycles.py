"""How a program walks layers of several kinds: runs of equal ones, and cycles of such runs.

A hybrid model repeats a pattern, say three recurrent layers and one of attention. Its program is
the pattern's, scanned over the repetitions, so that its size follows the pattern and not the depth.
Knows layers as keys that are equal or not.

Example:
    >>> find_cycles("GGGAGGGAGG")
    (Cycle(runs=((0, 1, 2, 4, 5, 6), (3, 7)), repeats=2), Cycle(runs=((8, 9),), repeats=1))
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Cycle:
    """Runs of layers that follow each other `repeats` times.

    `runs` has the layers of each run over all repetitions, in order: a run of n layers has
    n / repeats of them in each.
    """

    runs: tuple[tuple[int, ...], ...]
    repeats: int


@dataclass(frozen=True)
class _Group:
    """`count` equal layers in a row, the first of them `first`."""

    kind: int
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.kind, self.count

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.count)


def find_cycles(keys: Sequence[Hashable]) -> tuple[Cycle, ...]:
    """Splits layers into the cycles that have the fewest runs in all; equal keys, equal layers."""
    groups = _groups(keys)
    shapes = [group.shape for group in groups]
    # From the last group back: the fewest runs of all that follows, and the cycle to begin with.
    fewest = [0] * (len(groups) + 1)
    choice = [(1, 1)] * len(groups)
    for first in reversed(range(len(groups))):
        fewest[first] = 1 + fewest[first + 1]
        for length in range(2, (len(groups) - first) // 2 + 1):
            repeats = _repeats(shapes, first, length)
            runs = length + fewest[first + length * repeats]
            if repeats > 1 and runs < fewest[first]:
                fewest[first], choice[first] = runs, (length, repeats)
    found: list[Cycle] = []
    first = 0
    while first < len(groups):
        length, repeats = choice[first]
        own = groups[first : first + length * repeats]
        runs = tuple(
            tuple(layer for group in own[place::length] for layer in group.layers)
            for place in range(length)
        )
        found.append(Cycle(runs, repeats))
        first += length * repeats
    return tuple(found)


def _groups(keys: Sequence[Hashable]) -> list[_Group]:
    kinds = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    found: list[_Group] = []
    first = 0
    for kind, group in groupby(kinds[key] for key in keys):
        count = sum(1 for _ in group)
        found.append(_Group(kind, first, count))
        first += count
    return found


def _repeats(shapes: Sequence[tuple[int, int]], first: int, length: int) -> int:
    """How often the `length` groups from `first` on follow each other."""
    unit = shapes[first : first + length]
    end = first + length
    while shapes[end : end + length] == unit:
        end += length
    return (end - first) // length
