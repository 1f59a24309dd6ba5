"""One section of calls whose names, and maybe parameters, stand between tags, read as it arrives.

A call is told as soon as its name is known, a parameter that is a text while it arrives and any
other once it is whole. White space around tags is passed over. What is no call of the format is
left to be content.

Source: llama.cpp `common_chat_peg_mapper`, for how parameters become JSON.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from engine.text.call_piece import CallPiece, StepReader, escaped, json_of
from engine.text.chat_format import TaggedFormat
from engine.text.json_parts import JsonEnd
from engine.text.parameter_kinds import Kind, ParameterKinds
from engine.text.tape import Marks, Tape

_NAME = re.compile(r"[^\s<]*")
_NUMBER = re.compile(r":[0-9]+\Z")


class _Place(Enum):
    CALL = auto()
    ID = auto()
    NAME = auto()
    HEAD = auto()
    JSON = auto()
    PARAMETER = auto()
    PARAMETER_NAME = auto()
    PARAMETER_HEAD = auto()
    BEFORE_VALUE = auto()
    VALUE_START = auto()
    VALUE = auto()
    BEHIND_VALUE = auto()
    END = auto()


class TaggedReader(StepReader):
    """Implements `engine.text.call_piece.SectionReader`. `mark` is what opened the section."""

    def __init__(
        self, tools: TaggedFormat, kinds: ParameterKinds, mark: str, num_calls: int = 0
    ) -> None:
        super().__init__(num_calls)
        self._tools = tools
        self._kinds = kinds
        self._calls = Marks([tools.end, tools.call_start])
        self._id_end = Marks([tools.id_end])
        self._name_end = Marks([tools.name_end])
        self._head_end = Marks([tools.head_end])
        self._call_end = Marks([tools.call_end])
        self._closing = tools.call_end or tools.end
        tags = tools.parameter
        if tags is not None:
            self._parameters = Marks([self._closing, tags.start])
            self._parameter_name_end = Marks([tags.name_end])
            self._parameter_head_end = Marks([tags.head_end])
            self._value_start = Marks([tags.value_start, *(tags.kind_marks or ())])
            self._opening_gap = Marks([tags.gap, tags.verbatim[0]])
            self._value_end = Marks([tags.end, tags.gap + tags.end])
            self._verbatim_end = Marks([tags.verbatim[1]])
            self._tag_end = Marks([tags.end])
        is_call = tools.opens_bare and mark == tools.call_start
        self._place = _Place.NAME if is_call else _Place.CALL
        self._texts: list[str] = []
        self._name = self._id = ""
        self._num_parameters = 0
        self._kind = Kind.EITHER
        self._is_verbatim = False
        self._json = JsonEnd()
        self._is_opening = False

    def _step(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        match self._place:
            case _Place.CALL:
                return self._read_call(tape)
            case _Place.ID:
                return self._read_id(tape)
            case _Place.HEAD:
                return self._read_head(tape, self._head_end, self._behind_name())
            case _Place.PARAMETER_HEAD:
                return self._read_head(tape, self._parameter_head_end, _Place.BEFORE_VALUE)
            case _Place.NAME:
                return self._read_name(tape, pieces)
            case _Place.JSON:
                return self._read_json(tape, pieces)
            case _Place.PARAMETER:
                return self._read_parameter(tape, pieces)
            case _Place.PARAMETER_NAME:
                return self._read_parameter_name(tape, pieces)
            case _Place.BEFORE_VALUE:
                return self._read_value_start(tape)
            case _Place.VALUE_START:
                return self._begin_value(tape, pieces)
            case _Place.VALUE:
                return self._read_value(tape, pieces)
            case _Place.BEHIND_VALUE:
                return self._read_tag_end(tape)
            case _Place.END:
                return self._read_end(tape)

    def _read_call(self, tape: Tape) -> bool:
        """Before a call, or the end of the section."""
        tape.skip_space()
        mark = tape.meets(self._calls)
        if mark is None:
            return False
        tape.take(len(mark))
        if mark == self._tools.end or (not mark and self._tools.call_start):
            return self._finish()
        self._place = _Place.ID if self._tools.id_end else _Place.NAME
        return True

    def _read_id(self, tape: Tape) -> bool:
        found = tape.take_until(self._id_end)
        self._texts.append(found.text)
        if found.mark:
            self._id, self._place = self._take_texts().strip(), _Place.NAME
        return bool(found.mark)

    def _read_head(self, tape: Tape, end: Marks, then: _Place) -> bool:
        """Passes over what says nothing."""
        found = tape.take_until(end)
        if found.mark:
            self._place = then
        return bool(found.mark)

    def _behind_name(self) -> _Place:
        return _Place.PARAMETER if self._tools.parameter else _Place.JSON

    def _read_name(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        if self._tools.name_end:
            found = tape.take_until(self._name_end)
            self._texts.append(found.text)
            is_whole = bool(found.mark)
        else:
            self._texts.append(tape.take_matching(_NAME))
            is_whole = not tape.is_empty
        if not is_whole:
            return False
        name = self._take_texts().strip()
        if not name:
            return self._finish()
        call_id = f"{self._tools.id_start}{name}" if self._tools.id_start else self._id
        self._name = _NUMBER.sub("", name) if self._tools.id_start else name
        pieces.append(CallPiece(self.num_calls, "{", self._name, call_id))
        self._place = _Place.HEAD if self._tools.head_end else self._behind_name()
        self._num_parameters, self._json, self._is_opening = 0, JsonEnd(), True
        return True

    def _take_texts(self) -> str:
        text = "".join(self._texts)
        self._texts.clear()
        return text

    def _read_json(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        if self._is_opening:
            tape.skip_space()
            if not tape.next_char:
                return False
            if tape.next_char != "{":
                return self._break_off(pieces)
            # It was told with the name.
            tape_text, self._is_opening = self._json.read(tape), False
            arguments = tape_text[1:]
        else:
            arguments = self._json.read(tape)
        if arguments:
            pieces.append(CallPiece(self.num_calls, arguments))
        if self._json.is_done:
            self._place = _Place.END
        return self._json.is_done

    def _read_parameter(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """Before a parameter, or the end of the call."""
        tape.skip_space()
        mark = tape.meets(self._parameters)
        if mark is None:
            return False
        if not mark:
            return self._break_off(pieces)
        if mark == self._closing:
            pieces.append(CallPiece(self.num_calls, "}"))
            self._place = _Place.END
            return True
        tape.take(len(mark))
        self._place = _Place.PARAMETER_NAME
        return True

    def _read_parameter_name(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        found = tape.take_until(self._parameter_name_end)
        self._texts.append(found.text)
        if not found.mark:
            return False
        name = self._take_texts().strip()
        self._kind = self._kinds.kind(self._name, name)
        comma = "," if self._num_parameters else ""
        pieces.append(CallPiece(self.num_calls, f"{comma}{json.dumps(name, ensure_ascii=False)}:"))
        self._num_parameters += 1
        has_head = bool(self._parameter_head_end.texts)
        self._place = _Place.PARAMETER_HEAD if has_head else _Place.BEFORE_VALUE
        return True

    def _read_value_start(self, tape: Tape) -> bool:
        """Behind a parameter's name: what must come before its value."""
        tags = self._tools.parameter
        assert tags is not None
        if self._value_start.texts:
            if tags.value_start:
                tape.skip_space()
            mark = tape.meets(self._value_start)
            if mark is None:
                return False
            tape.take(len(mark))
            if tags.kind_marks and mark in tags.kind_marks:
                self._kind = (Kind.STRING, Kind.JSON)[tags.kind_marks.index(mark)]
        self._place = _Place.VALUE_START
        return True

    def _begin_value(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        tags = self._tools.parameter
        assert tags is not None
        self._is_verbatim = False
        if self._opening_gap.texts:
            mark = tape.meets(self._opening_gap)
            if mark is None:
                return False
            tape.take(len(mark))
            self._is_verbatim = bool(mark) and mark == tags.verbatim[0]
        if self._kind is Kind.STRING:
            pieces.append(CallPiece(self.num_calls, '"'))
        self._place = _Place.VALUE
        return True

    def _read_value(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        found = tape.take_until(self._verbatim_end if self._is_verbatim else self._value_end)
        if self._kind is not Kind.STRING:
            self._texts.append(found.text)
        elif found.text:
            pieces.append(CallPiece(self.num_calls, escaped(found.text)))
        if not found.mark:
            return False
        shown = '"' if self._kind is Kind.STRING else json_of(self._take_texts())
        pieces.append(CallPiece(self.num_calls, shown))
        self._place = _Place.BEHIND_VALUE if self._is_verbatim else _Place.PARAMETER
        return True

    def _read_tag_end(self, tape: Tape) -> bool:
        """Behind a text between marks of its own."""
        mark = tape.meets(self._tag_end)
        if mark is None:
            return False
        tape.take(len(mark))
        self._place = _Place.PARAMETER
        return True

    def _read_end(self, tape: Tape) -> bool:
        """Behind a call's arguments."""
        if self._tools.call_end:
            tape.skip_space()
            mark = tape.meets(self._call_end)
            if mark is None:
                return False
            tape.take(len(mark))
        self.num_calls += 1
        if not self._tools.end:
            return self._finish()
        self._place = _Place.CALL
        return True

    def _break_off(self, pieces: list[CallPiece]) -> bool:
        """What follows does not belong to the call that was told."""
        pieces.append(CallPiece(self.num_calls, "}"))
        self.num_calls += 1
        return self._finish()

    def _finish(self) -> bool:
        self.is_done = True
        return True
