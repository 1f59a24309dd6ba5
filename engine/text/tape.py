"""Text that arrives in pieces and is read from its front, in linear time however it is cut.

Knows no format. What may still become one of the marks that are looked for stays on the tape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SPACE = " \t\r\n"
_SPACES = re.compile(r"\s*")


class Marks:
    """Texts that are looked for together; where several begin, the longest counts. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if text}, key=len, reverse=True))
        self.longest = len(self.texts[0]) if self.texts else 0
        self._any = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._beginnings = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._first = frozenset(text[0] for text in self.texts)

    def find(self, text: str, at: int) -> tuple[int, int] | None:
        """Returns where the first mark from a place on begins and ends."""
        found = self._any.search(text, at)
        return found.span() if found else None

    def match(self, text: str, at: int) -> str:
        """Returns the mark that begins at a place, or ""."""
        found = self._any.match(text, at)
        return found.group() if found else ""

    def may_grow(self, text: str, at: int) -> bool:
        """Says whether all from a place on is the beginning of a mark, and not all of it."""
        return 0 < len(text) - at < self.longest and text[at:] in self._beginnings

    def num_open(self, text: str, at: int) -> int:
        """Returns how many characters at the end of a text may begin a mark."""
        start = max(at, len(text) - self.longest + 1)
        for place in range(start, len(text)):
            if text[place] in self._first and text[place:] in self._beginnings:
                return len(text) - place
        return 0


@dataclass(frozen=True)
class Found:
    """Text that was taken, and the mark behind it; "" where none came yet."""

    text: str
    mark: str


class Tape:
    """The text of one generation that is not read yet. `is_last`: no more will come."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._taken: list[str] | None = None
        self.is_last = False

    def push(self, piece: str) -> None:
        """Puts a piece behind what is there."""
        self._text, self._at = self._text[self._at :] + piece, 0

    @property
    def is_empty(self) -> bool:
        """Whether all is read."""
        return self._at >= len(self._text)

    @property
    def num_left(self) -> int:
        """How many characters are not read."""
        return len(self._text) - self._at

    @property
    def next_char(self) -> str:
        """The next character, or ""."""
        return self._text[self._at : self._at + 1]

    def peek(self, pattern: re.Pattern[str]) -> str:
        """Returns what a pattern matches here, and leaves it."""
        found = pattern.match(self._text, self._at)
        return found.group() if found else ""

    def peek_chars(self, num_chars: int) -> str:
        """Returns the next characters, as many as there are, and leaves them."""
        return self._text[self._at : self._at + num_chars]

    def has_only(self, num_chars: int) -> bool:
        """Says whether no more than so many characters are there."""
        return len(self._text) - self._at <= num_chars

    def record(self) -> None:
        """From here on notes what is taken, for `give_back`."""
        self._taken = []

    def keep(self) -> None:
        """What was taken is not wanted back."""
        self._taken = None

    def give_back(self) -> str:
        """Returns all that was taken since `record`; the tape stays where it is."""
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def take(self, num_chars: int) -> str:
        """Takes characters, as many as there are."""
        text = self._text[self._at : self._at + num_chars]
        self._at += len(text)
        if self._taken is not None:
            self._taken.append(text)
        return text

    def take_all(self) -> str:
        """Takes what there is."""
        return self.take(len(self._text) - self._at)

    def take_matching(self, pattern: re.Pattern[str]) -> str:
        """Takes what a pattern matches here."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def skip_space(self) -> None:
        """Passes over white space."""
        self.take_matching(_SPACES)

    def meets(self, marks: Marks) -> str | None:
        """Returns the mark that is next, "" if there is none, None if only more text could tell."""
        if self.is_empty or marks.may_grow(self._text, self._at):
            return None
        return marks.match(self._text, self._at)

    def take_until(self, marks: Marks) -> Found:
        """Takes the text before the first mark, and the mark; what may begin one is left."""
        span = marks.find(self._text, self._at)
        if span is not None:
            begin, end = span
            if not self.is_last and marks.may_grow(self._text, begin):
                return Found(self.take(begin - self._at), "")
            text = self.take(begin - self._at)
            return Found(text, self.take(end - begin))
        kept = 0 if self.is_last else marks.num_open(self._text, self._at)
        return Found(self.take(len(self._text) - self._at - kept), "")
