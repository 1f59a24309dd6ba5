"""One section of calls in the manner of Python, `[name(key=value, ...), ...]`, read as it arrives.

Values become JSON: either kind of quotes, `True`, `False` and `None`.

Source: llama.cpp `python_style_tool_calls`, `normalize_quotes_to_json`.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from engine.text.call_piece import CallPiece, StepReader, escaped
from engine.text.chat_format import PythonFormat
from engine.text.tape import Marks, Tape

_NAME = re.compile(r"[^\s()\[\]{},=:'\"]*")
_WORD = re.compile(r"[\w.+-]*")
_OTHER = re.compile(r"[^\w.+\-'\"\[\]{}(),]+")
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_UNICODE_LENGTH = 6


class PythonValue:
    """Takes one value from a tape as JSON, up to the comma or bracket behind it."""

    def __init__(self) -> None:
        self._quote = ""
        self._depth = 0
        self.is_done = False

    def read(self, tape: Tape) -> str:
        """Returns what there is of the value, as JSON."""
        parts: list[str] = []
        while not self.is_done and not tape.is_empty:
            part = self._in_string(tape) if self._quote else self._outside(tape)
            if part is None:
                break
            parts.append(part)
        return "".join(parts)

    def _outside(self, tape: Tape) -> str | None:
        char = tape.next_char
        if char in self._closing():
            self.is_done = True
            return ""
        if char in "'\"":
            tape.take(1)
            self._quote = char
            return '"'
        if char in "[{(":
            self._depth += 1
            return tape.take(1).replace("(", "[")
        if char in "]})":
            self._depth -= 1
            return tape.take(1).replace(")", "]")
        if char == ",":
            return tape.take(1)
        word = tape.peek(_WORD)
        if not word:
            return tape.take_matching(_OTHER)
        if tape.has_only(len(word)) and not tape.is_last:
            return None
        tape.take(len(word))
        return _WORDS.get(word, word)

    def _closing(self) -> str:
        return "" if self._depth else ",)]}"

    def _in_string(self, tape: Tape) -> str | None:
        text = tape.take_matching(_PLAIN[self._quote])
        if text:
            return escaped(text)
        if tape.next_char == self._quote:
            tape.take(1)
            self._quote = ""
            return '"'
        if tape.has_only(1):
            return None
        return self._escape(tape)

    def _escape(self, tape: Tape) -> str | None:
        pair = tape.peek_chars(2)
        if pair[1] == "u":
            if tape.has_only(_UNICODE_LENGTH - 1) and not tape.is_last:
                return None
            return tape.take_matching(_UNICODE) or escaped(tape.take(2))
        tape.take(2)
        if pair[1] in _ESCAPES:
            return pair
        return pair[1] if pair[1] == "'" else escaped(pair)


class _Place(Enum):
    OPEN = auto()
    NAME = auto()
    KEY = auto()
    VALUE = auto()
    BEHIND = auto()
    END = auto()


class PythonReader(StepReader):
    """Implements `engine.text.call_piece.SectionReader`."""

    def __init__(self, tools: PythonFormat, num_calls: int = 0) -> None:
        super().__init__(num_calls)
        self._end = Marks([tools.end])
        self._place = _Place.OPEN
        self._texts: list[str] = []
        self._value = PythonValue()
        self._num_arguments = 0

    def _step(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        match self._place:
            case _Place.OPEN:
                return self._open(tape)
            case _Place.NAME:
                return self._read_name(tape, pieces)
            case _Place.KEY:
                return self._read_key(tape, pieces)
            case _Place.VALUE:
                return self._read_value(tape, pieces)
            case _Place.BEHIND:
                return self._read_behind(tape)
            case _Place.END:
                return self._read_end(tape)

    def _open(self, tape: Tape) -> bool:
        tape.skip_space()
        if tape.next_char != "[":
            self.is_done = not tape.is_empty
            return False
        tape.take(1)
        self._place = _Place.NAME
        return True

    def _read_word(self, tape: Tape, behind: str) -> str | None:
        """Returns a word with the character behind it; "" where that is another, None for more."""
        tape.skip_space()
        if text := tape.take_matching(_NAME):
            self._texts.append(text)
        tape.skip_space()
        if tape.is_empty:
            return None
        word = "".join(self._texts)
        self._texts.clear()
        if not word or tape.next_char != behind:
            self.is_done = True
            return ""
        tape.take(1)
        return word

    def _read_name(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        name = self._read_word(tape, "(")
        if not name:
            return False
        pieces.append(CallPiece(self.num_calls, "{", name))
        self._place, self._num_arguments = _Place.KEY, 0
        return True

    def _read_key(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """Before an argument, or the end of the call."""
        tape.skip_space()
        if tape.next_char == "," and self._num_arguments and not self._texts:
            tape.take(1)
            tape.skip_space()
        if tape.next_char == ")" and not self._texts:
            tape.take(1)
            return self._close(pieces)
        key = self._read_word(tape, "=")
        if key is None:
            return False
        if not key:
            return self._close(pieces) and False
        comma = "," if self._num_arguments else ""
        pieces.append(CallPiece(self.num_calls, f"{comma}{json.dumps(key, ensure_ascii=False)}:"))
        self._num_arguments += 1
        self._place, self._value = _Place.VALUE, PythonValue()
        return True

    def _close(self, pieces: list[CallPiece]) -> bool:
        pieces.append(CallPiece(self.num_calls, "}"))
        self.num_calls += 1
        self._place = _Place.BEHIND
        return True

    def _read_value(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        shown = self._value.read(tape)
        if shown:
            pieces.append(CallPiece(self.num_calls, shown))
        if self._value.is_done:
            self._place = _Place.KEY
        return self._value.is_done

    def _read_behind(self, tape: Tape) -> bool:
        """Behind a call."""
        tape.skip_space()
        if not tape.next_char:
            return False
        if tape.next_char == ",":
            tape.take(1)
            self._place = _Place.NAME
            return True
        if tape.next_char == "]":
            tape.take(1)
        self._place = _Place.END
        return True

    def _read_end(self, tape: Tape) -> bool:
        tape.skip_space()
        mark = tape.meets(self._end)
        if mark is None:
            return False
        tape.take(len(mark))
        self.is_done = True
        return False
