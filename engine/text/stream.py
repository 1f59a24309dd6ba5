"""Releases generated text piece by piece, holding back what may still become a stop string.

Works on bytes, because a token may end inside a character. Knows no tokenizer and no budget.

Example:
    >>> stream = TextStream(["END"])
    >>> stream.push(b"the E").text, stream.push(b"ND").text
    ('', 'the ')
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """What one token set free.

    `mid_character`: the text so far ends inside a character, so nothing was looked at or set
    free. `stop_string` is the one that was found; the text ends before it and the stream is over.
    """

    text: str
    mid_character: bool = False
    stop_string: str | None = None


class TextStream:
    """The text of one generation. Not shared between threads.

    An empty stop string is found at the first complete token.

    Source: llama-server `process_token`, `find_stopping_strings`, `validate_utf8`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Stop(stop) for stop in stops]
        self._unsent = bytearray()

    def push(self, piece: bytes, *, is_eog: bool = False) -> Release:
        """Adds a token's piece and returns what may be shown now.

        An end-of-generation token sets free what a possible stop string held back.
        """
        self._unsent += piece
        for stop in self._stops:
            stop.follow(piece)
        if _ends_mid_character(self._unsent):
            return Release("", mid_character=True)
        found = self._find_stop(len(piece))
        if found is not None:
            position, text = found
            del self._unsent[position:]
            return Release(self._flush(), stop_string=text)
        if not is_eog and any(stop.is_begun for stop in self._stops):
            return Release("")
        return Release(self._flush())

    def unsent(self) -> str:
        """Returns the text that is held back; an incomplete character prints as U+FFFD."""
        return self._unsent.decode("utf-8", "replace")

    def _flush(self) -> str:
        text = self.unsent()
        self._unsent.clear()
        for stop in self._stops:
            stop.forget()
        return text

    def _find_stop(self, piece_bytes: int) -> tuple[int, str] | None:
        """Returns position and text of the earliest stop string, the first given where two tie.

        Only what the last piece can have completed is searched, so a stop string that begins in a
        piece cut inside a character is found where llama.cpp finds it.
        """
        earliest: tuple[int, str] | None = None
        for stop in self._stops:
            start = max(0, len(self._unsent) - len(stop.pattern) - piece_bytes)
            position = self._unsent.find(stop.pattern, start)
            if position >= 0 and (earliest is None or position < earliest[0]):
                earliest = (position, stop.text)
        return earliest


class _Stop:
    """A stop string, and how much of its beginning the unsent text ends with.

    Follows the text byte by byte (Knuth-Morris-Pratt): comparing ends anew after every token would
    take quadratic time on a long stop string that repeats itself.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.pattern = text.encode("utf-8", "surrogatepass")
        self._borders = _borders(self.pattern)
        self._matched = 0

    @property
    def is_begun(self) -> bool:
        return self._matched > 0

    def follow(self, piece: bytes) -> None:
        if self.pattern:
            for byte in piece:
                self._matched = _advance(self.pattern, self._borders, self._matched, byte)

    def forget(self) -> None:
        self._matched = 0


def _borders(pattern: bytes) -> array[int]:
    """For every prefix, by length, the longest shorter prefix that it also ends with."""
    borders = array("q", [0]) * (len(pattern) + 1)
    for length in range(2, len(pattern) + 1):
        borders[length] = _advance(pattern, borders, borders[length - 1], pattern[length - 1])
    return borders


def _advance(pattern: bytes, borders: array[int], matched: int, byte: int) -> int:
    while matched and (matched == len(pattern) or pattern[matched] != byte):
        matched = borders[matched]
    return matched + (pattern[matched] == byte)


def _ends_mid_character(text: bytes | bytearray) -> bool:
    """Whether one of the last bytes begins a character that is longer than what follows it."""
    for length, byte in enumerate(text[:-5:-1], start=1):
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4
        if byte & 0xC0 == 0xC0 and byte < 0xF8 and length < needed:
            return True
    return False
