"""One section of tool calls that are JSON objects, or names with JSON behind them.

Arguments are passed on as they are written. A call is told as soon as its name is known, with the
brace that its arguments will open with, as the peer does. What is no call of the format is left to
be content: a grammar keeps a model from writing it.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from engine.text.call_piece import CallPiece, StepReader
from engine.text.chat_format import ToolFormat
from engine.text.json_parts import JsonEnd, JsonWord
from engine.text.tape import Marks, Tape


class _Place(Enum):
    OPEN = auto()
    NAME = auto()
    KEY = auto()
    COLON = auto()
    MEMBER = auto()
    BEHIND_MEMBER = auto()
    ARGUMENTS = auto()
    OBJECT = auto()
    TEXT = auto()
    BEHIND_CALL = auto()
    END = auto()


class CallReader(StepReader):
    """Implements `engine.text.call_piece.SectionReader`."""

    def __init__(self, tools: ToolFormat, num_calls: int = 0) -> None:
        super().__init__(num_calls)
        self._tools = tools
        self._name_end = Marks([tools.name_end])
        self._end = Marks([tools.end])
        notes = [tools.id_start, *tools.note_starts]
        self._notes = re.compile("|".join(re.escape(note) for note in notes if note) or "(?!)")
        self._place = _Place.NAME if tools.name_end else _Place.OPEN
        self._word = JsonWord()
        self._value = JsonEnd()
        self._texts: list[str] = []
        self._key = self._name = self._id = ""
        # Arguments that came before the name.
        self._early: list[str] = []
        self._is_told = self._has_arguments = self._is_opening = False

    def _step(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        match self._place:
            case _Place.OPEN:
                return self._open(tape)
            case _Place.NAME:
                return self._read_name(tape, pieces)
            case _Place.KEY:
                return self._read_key(tape)
            case _Place.COLON:
                return self._read_colon(tape, pieces)
            case _Place.MEMBER:
                return self._read_member(tape, pieces)
            case _Place.BEHIND_MEMBER:
                return self._read_comma(tape, pieces)
            case _Place.ARGUMENTS:
                return self._begin_arguments(tape)
            case _Place.OBJECT:
                return self._read_object(tape, pieces)
            case _Place.TEXT:
                return self._read_text(tape, pieces)
            case _Place.BEHIND_CALL:
                return self._read_behind(tape)
            case _Place.END:
                return self._read_end(tape)

    def _open(self, tape: Tape) -> bool:
        """Before a call's object."""
        tape.skip_space()
        char = tape.next_char
        if not char:
            return False
        if char in ("[", ",") and self._tools.is_list:
            tape.take(1)
            return True
        if char != "{":
            return self._finish()
        tape.take(1)
        self._place, self._word = _Place.KEY, JsonWord()
        return True

    def _read_name(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        found = tape.take_until(self._name_end)
        self._texts.append(found.text)
        if not found.mark:
            return False
        text = "".join(self._texts)
        note = self._notes.search(text)
        self._name = (text[: note.start()] if note else text).strip()
        if self._tools.id_start:
            self._id = text.partition(self._tools.id_start)[2]
        if not self._name:
            return self._finish()
        self._tell(pieces)
        self._place = _Place.ARGUMENTS
        return True

    def _tell(self, pieces: list[CallPiece]) -> None:
        """Tells of a call, once, and of arguments that came before its name."""
        if self._is_told:
            return
        pieces.append(CallPiece(self.num_calls, "{", self._name, self._id))
        self._is_told = True
        self._pass_on("".join(self._early), pieces)
        self._early.clear()

    def _pass_on(self, arguments: str, pieces: list[CallPiece]) -> None:
        if not self._is_told:
            self._early.append(arguments)
        elif arguments:
            pieces.append(CallPiece(self.num_calls, arguments))

    def _read_key(self, tape: Tape) -> bool:
        tape.skip_space()
        if tape.next_char == "}":
            self._place = _Place.BEHIND_MEMBER
            return True
        key = self._word.read(tape)
        if key is None:
            return False
        self._key, self._place = key, _Place.COLON
        return True

    def _read_colon(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        tape.skip_space()
        if not tape.next_char:
            return False
        if tape.next_char != ":":
            return self._finish()
        tape.take(1)
        if self._tools.name_is_key and not self._is_told:
            self._name = self._key
            if not self._name:
                return self._finish()
            self._tell(pieces)
            self._place = _Place.ARGUMENTS
        elif self._key == self._tools.arguments_key and not self._has_arguments:
            self._place = _Place.ARGUMENTS
        else:
            self._place, self._word = _Place.MEMBER, JsonWord()
        return True

    def _read_member(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        tape.skip_space()
        if tape.next_char in ("{", "["):
            # No member that says anything.
            self._place, self._key, self._value = _Place.OBJECT, "", JsonEnd()
            return True
        value = self._word.read(tape)
        if value is None:
            return False
        if self._key == self._tools.name_key:
            self._name = value
            if not value:
                return self._finish()
            self._tell(pieces)
        elif self._key == self._tools.id_key:
            self._id = value
        self._place = _Place.BEHIND_MEMBER
        return True

    def _read_comma(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """Behind a member of a call's object."""
        tape.skip_space()
        char = tape.next_char
        if not char:
            return False
        if char == ",":
            tape.take(1)
            self._place, self._word = _Place.KEY, JsonWord()
            return True
        if char == "}":
            tape.take(1)
        elif not self._has_arguments:
            return self._finish()
        if not self._is_told:
            return self._finish()
        if not self._has_arguments:
            self._pass_on("}", pieces)
        self._next_call()
        return True

    def _begin_arguments(self, tape: Tape) -> bool:
        tape.skip_space()
        if not tape.next_char:
            return False
        self._has_arguments = self._is_opening = True
        is_object = tape.next_char in ("{", "[")
        self._place = _Place.OBJECT if is_object else _Place.TEXT
        self._value, self._word = JsonEnd(), JsonWord()
        self._key = self._tools.arguments_key
        return True

    def _read_object(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        text = self._value.read(tape)
        if self._key:
            if self._is_opening and text:
                # The brace was told with the name.
                text, self._is_opening = text.removeprefix("{"), False
            self._pass_on(text, pieces)
        if self._value.is_done:
            self._behind_arguments()
        return self._value.is_done

    def _read_text(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """Arguments that are no object: maybe one in a string."""
        text = self._word.read(tape)
        if text is None:
            return False
        text = text.strip()
        self._pass_on(text[1:] if text.startswith("{") else "}", pieces)
        self._behind_arguments()
        return True

    def _behind_arguments(self) -> None:
        if self._tools.name_end:
            self._next_call()
        else:
            self._place = _Place.BEHIND_MEMBER

    def _next_call(self) -> None:
        self.num_calls += 1
        self._key = self._name = self._id = ""
        self._is_told = self._has_arguments = False
        self._texts.clear()
        self._place = _Place.END if self._tools.name_end else _Place.BEHIND_CALL

    def _read_behind(self, tape: Tape) -> bool:
        """Behind a call's object."""
        tape.skip_space()
        char = tape.next_char
        if not char:
            return False
        if char == ",":
            tape.take(1)
            self._place = _Place.OPEN
            return True
        if char == "{":
            self._place = _Place.OPEN
            return True
        if char == "]" and self._tools.is_list:
            tape.take(1)
        self._place = _Place.END
        return True

    def _read_end(self, tape: Tape) -> bool:
        if not self._tools.end:
            return self._finish()
        tape.skip_space()
        mark = tape.meets(self._end)
        if mark is None:
            return False
        tape.take(len(mark))
        return self._finish()

    def _finish(self) -> bool:
        self.is_done = True
        return True
