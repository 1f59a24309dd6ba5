"""Cuts text into special tokens and the plain runs between them. Knows no encoder.

llama.cpp takes special tokens one after the other, the longest first, and removes each from
every run of text that is still plain. Doing the same with a claim per character keeps its
answers (a longer token further right wins over a shorter one to its left) in linear time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from engine.text.token_table import (
    CONTROL,
    HIDDEN,
    LSTRIP,
    RSTRIP,
    UNKNOWN,
    USER_DEFINED,
    TokenTable,
)

# What C's isspace() accepts.
_SPACES = frozenset(" \t\n\v\f\r")

_FREE = b"\0"
_CLAIMED = 1


class SpecialPartition:
    """Finds a table's special tokens in text. Immutable, so any number of threads may share it."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        special = table.tokens_with(CONTROL | USER_DEFINED | UNKNOWN)
        self._always = _Matcher(table, [i for i in special if not table.attributes[i] & HIDDEN])
        self._all = _Matcher(table, special)

    def split(self, text: str, *, parse_special: bool) -> Iterator[int | str]:
        """Yields special token ids and the non-empty plain runs between them, in order.

        User-defined tokens are always found; control and unknown ones only if `parse_special`.

        Source: llama.cpp `llama_vocab::impl::tokenizer_st_partition`.
        """
        return (self._all if parse_special else self._always).split(text)


class _Matcher:
    """The tokens that one setting of `parse_special` looks for, by length and opening."""

    def __init__(self, table: TokenTable, token_ids: Sequence[int]) -> None:
        self._attributes = table.attributes
        # (UTF-8 length, characters) -> text -> id; and the openings (two characters, or the whole
        # of a one-character token) that each length has, so that most of a text is never looked up.
        self._by_length: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
        openings: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for token_id in token_ids:
            text = table.texts[token_id]
            length = (len(text.encode("utf-8", "surrogatepass")), len(text))
            self._by_length[length][text] = token_id
            openings[text[:2]].add(length)
        self._lengths = sorted(self._by_length, reverse=True)
        self._openings = dict(openings)
        first = "".join(re.escape(char) for char in sorted({text[0] for text in openings}))
        self._first = re.compile(f"[{first}]") if first else None

    def split(self, text: str) -> Iterator[int | str]:
        candidates = self._candidates(text)
        if not candidates:
            if text:
                yield text
            return
        found, claims = self._claim(text, candidates)
        start = 0
        for position in sorted(found):
            yield from _free_runs(text, claims, start, position)
            token_id, start = found[position]
            yield token_id
        yield from _free_runs(text, claims, start, len(text))

    def _candidates(self, text: str) -> dict[tuple[int, int], list[list[int]]]:
        """Returns, per length, the lists of positions where a token of it could begin."""
        if self._first is None:
            return {}
        positions: dict[str, list[int]] = defaultdict(list)
        for match in self._first.finditer(text):
            start = match.start()
            for opening in (text[start : start + 2], text[start]):
                if opening in self._openings:
                    positions[opening].append(start)
                if len(opening) < 2:
                    break
        by_length: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        for opening, starts in positions.items():
            for length in self._openings[opening]:
                by_length[length].append(starts)
        return by_length

    def _claim(
        self, text: str, candidates: dict[tuple[int, int], list[list[int]]]
    ) -> tuple[dict[int, tuple[int, int]], bytearray]:
        """Returns start -> (id, end) of what was found, and which characters are taken."""
        claims = bytearray(len(text))
        found: dict[int, tuple[int, int]] = {}
        for length in self._lengths:
            for starts in candidates.get(length, ()):
                num_found = len(found)
                self._claim_length(text, length, starts, found, claims)
                if len(found) != num_found:
                    # Shared between lengths: what is taken now is never looked at again.
                    starts[:] = [start for start in starts if not claims[start]]
        return found, claims

    def _claim_length(
        self,
        text: str,
        length: tuple[int, int],
        starts: Sequence[int],
        found: dict[int, tuple[int, int]],
        claims: bytearray,
    ) -> None:
        tokens, num_chars = self._by_length[length], length[1]
        for start in starts:
            end = start + num_chars
            token_id = tokens.get(text[start:end])
            if token_id is None or claims.find(_CLAIMED, start, end) >= 0:
                continue
            claims[start:end] = bytes([_CLAIMED]) * num_chars
            found[start] = (token_id, end)
            if self._attributes[token_id] & LSTRIP:
                _strip(text, claims, range(start - 1, -1, -1))
            if self._attributes[token_id] & RSTRIP:
                _strip(text, claims, range(end, len(text)))


def _strip(text: str, claims: bytearray, positions: range) -> None:
    for position in positions:
        if claims[position] or text[position] not in _SPACES:
            return
        claims[position] = _CLAIMED


def _free_runs(text: str, claims: bytearray, start: int, end: int) -> Iterator[str]:
    """Yields the unclaimed runs of a gap between tokens (stripped space is claimed, no token)."""
    while start < end:
        run_start = claims.find(_FREE, start, end)
        if run_start < 0:
            return
        run_end = claims.find(_CLAIMED, run_start, end)
        start = end if run_end < 0 else run_end
        yield text[run_start:start]
