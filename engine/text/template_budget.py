"""How much work one rendering may do.

Counted rather than timed, so that it ends the same way on every machine. A step is about a microsecond of template code. Characters bound the memory: everything that a
template writes or joins counts, also what it throws away. Knows no template.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from jinja2 import Undefined

from engine.errors import TemplateError

_BASE_STEPS = 200_000
_BASE_CHARS = 2_000_000
# What a message or a character of the input may cost on top: real templates need about a tenth.
_STEPS_PER_VALUE = 200
_CHARS_PER_CHAR = 24
# Comparing or copying text is far cheaper than a step, and not free.
_CHARS_PER_STEP = 512
_MAX_DEPTH = 128
_MAX_INTEGER_BITS = 4096
_SIMPLE = (bool, int, float, Undefined)


@dataclass(frozen=True)
class Weight:
    """The size of a value: itself and all that it contains, counted as often as it occurs."""

    values: int
    chars: int


class Budget:
    """What is left of one rendering's allowance.

    Every method raises `TemplateError` once the allowance is spent.
    """

    def __init__(self, inputs: Iterable[object]) -> None:
        self._steps = self._chars = 1 << 62
        weights = [self.weigh(value) for value in inputs]
        self._steps = _BASE_STEPS + _STEPS_PER_VALUE * sum(w.values for w in weights)
        self._chars = _BASE_CHARS + _CHARS_PER_CHAR * sum(w.chars for w in weights)

    def step(self, count: int = 1) -> None:
        """Pays for template code, `count` steps of it."""
        self._steps -= count
        if self._steps < 0:
            raise TemplateError("it does not come to an end within its allowed work")

    def write(self, num_chars: int) -> None:
        """Pays for text of this length, before it is made."""
        self.step(1 + num_chars // _CHARS_PER_STEP)
        self._chars -= num_chars
        if self._chars < 0:
            raise TemplateError("it writes more text than allowed")

    def read(self, *values: object) -> None:
        """Pays for looking at the whole of some values (comparing, hashing, joining)."""
        for value in values:
            # Nearly every value is short text, and walking is slow.
            if isinstance(value, str):
                self.step(1 + len(value) // _CHARS_PER_STEP)
            elif isinstance(value, (list, tuple, dict)):
                self.weigh(cast(object, value))
            else:
                self.step()

    def weigh(self, value: object) -> Weight:
        """Pays for walking through a value and returns its size.

        A list may hold the same list twice and so be small in memory and huge when written, hence
        the walk stops where the allowance does.
        """
        values = chars = 0
        pending: list[tuple[object, int]] = [(value, 0)]
        while pending:
            current, depth = pending.pop()
            values += 1
            self.step()
            if depth > _MAX_DEPTH:
                raise TemplateError(f"a value is nested more than {_MAX_DEPTH} deep")
            if isinstance(current, str):
                chars += len(current)
                self.step(len(current) // _CHARS_PER_STEP)
                continue
            children = _children(current)
            if children is None:
                raise TemplateError(f"a {type(current).__name__} is no data to show or compare")
            self.step(len(children))
            pending.extend((child, depth + 1) for child in children)
        return Weight(values, chars)

    def repeat(self, value: str | list[object] | tuple[object, ...], count: int) -> None:
        """Pays for a sequence repeated `count` times, before it is made."""
        size = len(value) * max(count, 0)
        if isinstance(value, str):
            self.write(size)
        else:
            self.step(size)

    def check_integer(self, bits: int) -> None:
        """Refuses integers whose arithmetic would take long."""
        if bits > _MAX_INTEGER_BITS:
            raise TemplateError(f"an integer needs more than {_MAX_INTEGER_BITS} bits")


def _children(value: object) -> list[object] | None:
    """What a container holds; nothing for a simple value, None for what is no data at all."""
    # Through the base types: a probe's values note who looks at them, and this is no template.
    if isinstance(value, dict):
        members = cast("dict[object, object]", value)
        return [*dict.keys(members), *dict.values(members)]
    if isinstance(value, list):
        return list[object].copy(cast("list[object]", value))
    if isinstance(value, tuple):
        return [*cast("tuple[object, ...]", value)]
    return [] if value is None or isinstance(value, _SIMPLE) else None
