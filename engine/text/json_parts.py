"""Parts of JSON that arrive in pieces: where a value ends, and whole words."""

from __future__ import annotations

import json
import re

from engine.text.tape import Tape

_IN_STRING = re.compile(r'(?:[^"\\]+|\\.)*', re.DOTALL)
_BARE = re.compile(r"[^\s,:{}\[\]]+")
# What cannot change the depth: everything but brackets and the beginning of a string.
_FLAT = re.compile(r'[^"{}\[\]]+')


class JsonEnd:
    """Takes a JSON object or list from a tape, as it is written."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self.is_done = False

    def read(self, tape: Tape) -> str:
        """Returns what there is of the value; `is_done` says that it has ended."""
        parts: list[str] = []
        while not self.is_done and not tape.is_empty:
            if self._in_string:
                parts.append(tape.take_matching(_IN_STRING))
                if tape.next_char == '"':
                    parts.append(tape.take(1))
                    self._in_string = False
                elif tape.is_last:
                    parts.append(tape.take_all())
                else:
                    break
                continue
            parts.append(tape.take_matching(_FLAT))
            parts.append(self._bracket(tape))
        return "".join(parts)

    def _bracket(self, tape: Tape) -> str:
        char = tape.next_char
        if char in ("}", "]") and not self._depth:
            # Not of this value.
            self.is_done = True
            return ""
        self._in_string = char == '"'
        if char in ("{", "["):
            self._depth += 1
        elif char in ("}", "]"):
            self._depth -= 1
            self.is_done = not self._depth
        return tape.take(1)


class JsonWord:
    """Takes a JSON string, or a bare word, from a tape."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._is_quoted: bool | None = None

    def read(self, tape: Tape) -> str | None:
        """Returns the text of the word; None if it is not complete."""
        if self._is_quoted is None:
            if tape.is_empty:
                return None
            self._is_quoted = tape.next_char == '"'
            if self._is_quoted:
                tape.take(1)
        self._parts.append(tape.take_matching(_IN_STRING if self._is_quoted else _BARE))
        if tape.is_empty or (self._is_quoted and tape.next_char != '"'):
            return None
        text = "".join(self._parts)
        if not self._is_quoted:
            return text
        tape.take(1)
        try:
            return json.loads(f'"{text}"', strict=False)
        except ValueError:
            return text
