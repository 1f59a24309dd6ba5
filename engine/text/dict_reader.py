"""One call whose arguments are a dictionary with bare keys and quotes of its own, read as it arrives.

Source: llama.cpp `gemma4_to_json`.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from engine.text.call_piece import CallPiece, escaped, json_of
from engine.text.chat_format import DictFormat
from engine.text.tape import Marks, Tape

_KEY = re.compile(r"[^:}]*")
_BARE = re.compile(r"[^\s,\]}]*")
_NAME = re.compile(r"[^{]*")


class _Place(Enum):
    NAME = auto()
    KEY = auto()
    VALUE = auto()
    STRING = auto()
    WORD = auto()
    BEHIND = auto()
    END = auto()


class DictReader:
    """Implements `engine.text.call_piece.SectionReader`: a section is one call."""

    def __init__(self, tools: DictFormat, num_calls: int = 0) -> None:
        self._end = Marks([tools.end])
        self._quote = Marks([tools.quote])
        self._place = _Place.NAME
        self._texts: list[str] = []
        # The brackets that are open, each with whether it holds something.
        self._open: list[str] = []
        self._is_first = True
        self.num_calls = num_calls
        self.is_done = False

    def read(self, tape: Tape) -> list[CallPiece]:
        """Reads as far as the tape tells, and returns what that added to calls."""
        pieces: list[CallPiece] = []
        shown: list[str] = []
        while not self.is_done and self._step(tape, pieces, shown):
            pass
        if shown:
            pieces.append(CallPiece(self._index(), "".join(shown)))
        return pieces

    def _index(self) -> int:
        return self.num_calls - (self._place is _Place.END or self.is_done)

    def _step(self, tape: Tape, pieces: list[CallPiece], shown: list[str]) -> bool:
        match self._place:
            case _Place.NAME:
                return self._read_name(tape, pieces)
            case _Place.KEY:
                return self._read_key(tape, shown)
            case _Place.VALUE:
                return self._begin_value(tape, shown)
            case _Place.STRING:
                return self._read_string(tape, shown)
            case _Place.WORD:
                return self._read_word(tape, shown)
            case _Place.BEHIND:
                return self._read_behind(tape, shown)
            case _Place.END:
                return self._read_end(tape)

    def _read_name(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        self._texts.append(tape.take_matching(_NAME))
        if tape.is_empty:
            return False
        tape.take(1)
        name = "".join(self._texts).strip()
        self._texts.clear()
        if not name:
            self.is_done = True
            return False
        pieces.append(CallPiece(self.num_calls, "{", name))
        self._begin("{")
        return True

    def _begin(self, bracket: str) -> None:
        self._open.append(bracket)
        self._is_first = True
        self._place = _Place.KEY if bracket == "{" else _Place.VALUE

    def _read_key(self, tape: Tape, shown: list[str]) -> bool:
        """Before a member of a dictionary, or its end."""
        if not self._texts:
            tape.skip_space()
        self._texts.append(tape.take_matching(_KEY))
        if tape.is_empty:
            return False
        key = "".join(self._texts).strip()
        self._texts.clear()
        if tape.next_char == "}":
            return self._close(tape, shown)
        tape.take(1)
        for quote in self._quote.texts:
            key = key.removeprefix(quote).removesuffix(quote)
        shown.append(f"{self._comma()}{json.dumps(key, ensure_ascii=False)}:")
        self._place = _Place.VALUE
        return True

    def _comma(self) -> str:
        is_first, self._is_first = self._is_first, False
        return "" if is_first else ","

    def _begin_value(self, tape: Tape, shown: list[str]) -> bool:
        tape.skip_space()
        if not tape.next_char:
            return False
        in_list = self._open[-1] == "["
        if in_list and tape.next_char == "]":
            return self._close(tape, shown)
        mark = tape.meets(self._quote)
        if mark is None:
            return False
        comma = self._comma() if in_list else ""
        if mark:
            tape.take(len(mark))
            shown.append(f'{comma}"')
            self._place = _Place.STRING
        elif tape.next_char in "{[":
            bracket = tape.take(1)
            shown.append(f"{comma}{bracket}")
            self._begin(bracket)
        else:
            shown.append(comma)
            self._place = _Place.WORD
        return True

    def _read_string(self, tape: Tape, shown: list[str]) -> bool:
        found = tape.take_until(self._quote)
        shown.append(escaped(found.text))
        if not found.mark:
            return False
        shown.append('"')
        self._place = _Place.BEHIND
        return True

    def _read_word(self, tape: Tape, shown: list[str]) -> bool:
        self._texts.append(tape.take_matching(_BARE))
        if tape.is_empty:
            return False
        word = "".join(self._texts)
        self._texts.clear()
        shown.append(json_of(word))
        self._place = _Place.BEHIND
        return True

    def _read_behind(self, tape: Tape, shown: list[str]) -> bool:
        """Behind a value."""
        tape.skip_space()
        char = tape.next_char
        if not char:
            return False
        if char in "}]":
            return self._close(tape, shown)
        if char == ",":
            tape.take(1)
            self._place = _Place.KEY if self._open[-1] == "{" else _Place.VALUE
            return True
        return self._break_off(shown)

    def _close(self, tape: Tape, shown: list[str]) -> bool:
        tape.take(1)
        shown.append("}" if self._open.pop() == "{" else "]")
        self._is_first = False
        self._place = _Place.BEHIND
        if not self._open:
            self.num_calls += 1
            self._place = _Place.END
        return True

    def _break_off(self, shown: list[str]) -> bool:
        """What follows does not belong to the call that was told."""
        shown.extend("}" if bracket == "{" else "]" for bracket in reversed(self._open))
        self._open.clear()
        self.num_calls += 1
        self.is_done = True
        return False

    def _read_end(self, tape: Tape) -> bool:
        mark = tape.meets(self._end)
        if mark is None:
            return False
        tape.take(len(mark))
        self.is_done = True
        return False
