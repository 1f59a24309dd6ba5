"""Names of samplers: the peer's canonical ones, their spellings and their letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from gateway.errors import wrong_type
from gateway.fields import Refusal

LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
    "i": "infill",
    "a": "adaptive_p",
}
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_SPELLINGS = {
    spelling: name
    for name in LETTERS.values()
    for spelling in (name, name.replace("_", "-"), name.replace("_", ""))
} | _ALIASES

# A chain that repeats samplers without end would cost every token of the request.
MAX_SAMPLERS = 64


def by_names(names: Sequence[str]) -> tuple[str, ...]:
    """Canonical names, in order; what is no sampler is dropped, repeats stay."""
    lowered = (name.lower() for name in names)
    return tuple(_SPELLINGS[name] for name in lowered if name in _SPELLINGS)


def by_letters(letters: str) -> tuple[str, ...]:
    """One sampler per letter; other characters are dropped."""
    return tuple(LETTERS[letter] for letter in letters if letter in LETTERS)


class SamplerNames:
    """The `samplers` field: names, a string of letters, or a type that leaves the default."""

    def read(self, value: Any) -> tuple[str, ...] | None:
        """Returns canonical names; None where the peer ignores the value.

        Raises:
            Refusal: an item of the list is no string, or the chain is longer than `MAX_SAMPLERS`.
        """
        if isinstance(value, str):
            chain = by_letters(value)
        elif isinstance(value, list):
            chain = by_names(_strings(cast("list[Any]", value)))
        else:
            return None
        if len(chain) > MAX_SAMPLERS:
            raise Refusal(f"there are {len(chain)} samplers, the limit is {MAX_SAMPLERS}")
        return chain


def _strings(items: Sequence[Any]) -> list[str]:
    for item in items:
        if not isinstance(item, str):
            raise Refusal(wrong_type("string", item))
    return list(items)
