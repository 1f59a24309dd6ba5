"""One section of calls whose arguments are elements inside elements, read as it arrives.

A parameter's name is the tag of its element; a list is a row of `item` elements. What a schema calls
a text is told while it arrives, any other leaf once it is whole.

Source: llama.cpp `common_chat_peg_minimax_m3_mapper`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from engine.text.call_piece import CallPiece, StepReader, escaped, json_of
from engine.text.chat_format import ElementFormat
from engine.text.parameter_kinds import ParameterKinds, may_be_text, part_of
from engine.text.tape import Marks, Tape

_ITEM = "item"


@dataclass
class _Element:
    """One that is open. `bracket` is "" while it is not known to hold elements."""

    name: str
    schema: Any
    bracket: str = ""
    num_parts: int = 0


class _Place(Enum):
    CALL = auto()
    NAME = auto()
    ELEMENT = auto()
    TAG = auto()
    VALUE = auto()
    TEXT = auto()
    CLOSING = auto()


class ElementReader(StepReader):
    """Implements `engine.text.call_piece.SectionReader`."""

    def __init__(self, tools: ElementFormat, kinds: ParameterKinds, num_calls: int = 0) -> None:
        super().__init__(num_calls)
        self._tools = tools
        self._kinds = kinds
        self._calls = Marks([tools.end, tools.call_start])
        self._name_end = Marks([tools.name_end])
        self._opening, self._closing = f"{tools.prefix}<", f"{tools.prefix}</"
        self._tags = Marks([self._opening, self._closing])
        self._tag_end = Marks([">"])
        self._place = _Place.CALL
        self._texts: list[str] = []
        self._elements: list[_Element] = []
        self._text_end = Marks([])
        self._is_text = False

    def _step(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        match self._place:
            case _Place.CALL:
                return self._read_call(tape)
            case _Place.NAME:
                return self._read_name(tape, pieces)
            case _Place.ELEMENT:
                return self._read_element(tape, pieces)
            case _Place.TAG:
                return self._read_tag(tape, pieces)
            case _Place.VALUE:
                return self._begin_value(tape, pieces)
            case _Place.TEXT:
                return self._read_text(tape, pieces)
            case _Place.CLOSING:
                return self._read_closing(tape, pieces)

    def _tell(self, text: str, pieces: list[CallPiece]) -> None:
        if text:
            pieces.append(CallPiece(self.num_calls, text))

    def _read_call(self, tape: Tape) -> bool:
        """Before a call, or the end of the section."""
        tape.skip_space()
        mark = tape.meets(self._calls)
        if mark is None:
            return False
        tape.take(len(mark))
        if mark != self._tools.call_start:
            self.is_done = True
            return False
        self._place = _Place.NAME
        return True

    def _read_name(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        name = self._read_until(tape, self._name_end)
        if not name:
            self.is_done = name is not None
            return False
        pieces.append(CallPiece(self.num_calls, "{", name))
        self._elements = [_Element("invoke", self._kinds.schema(name), "{")]
        self._place = _Place.ELEMENT
        return True

    def _read_until(self, tape: Tape, mark: Marks) -> str | None:
        found = tape.take_until(mark)
        self._texts.append(found.text)
        if not found.mark:
            return None
        text = "".join(self._texts)
        self._texts.clear()
        return text.strip()

    def _read_element(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """Inside an element that holds elements: before one of them, or at its end."""
        tape.skip_space()
        mark = tape.meets(self._tags)
        if mark is None:
            return False
        if not mark:
            return self._break_off(pieces)
        tape.take(len(mark))
        self._place = _Place.TAG if mark == self._opening else _Place.CLOSING
        return True

    def _read_tag(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        name = self._read_until(tape, self._tag_end)
        if name is None:
            return False
        parent = self._elements[-1]
        if not parent.bracket:
            parent.bracket = "[" if name == _ITEM else "{"
            self._tell(parent.bracket, pieces)
        comma = "," if parent.num_parts else ""
        key = f"{json.dumps(name, ensure_ascii=False)}:" if parent.bracket == "{" else ""
        parent.num_parts += 1
        self._tell(comma + key, pieces)
        schema = part_of(parent.schema, "" if parent.bracket == "[" else name)
        self._elements.append(_Element(name, schema))
        self._place = _Place.VALUE
        return True

    def _begin_value(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        element = self._elements[-1]
        # What may be a text is one.
        is_text = element.schema is not None and may_be_text(element.schema)
        if not is_text:
            tape.skip_space()
            mark = tape.meets(self._tags)
            if mark is None:
                return False
            if mark == self._opening:
                self._place = _Place.ELEMENT
                return True
        self._is_text = is_text
        if self._is_text:
            self._tell('"', pieces)
        self._text_end = Marks([f"{self._closing}{element.name}>"])
        self._place = _Place.TEXT
        return True

    def _read_text(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        found = tape.take_until(self._text_end)
        if self._is_text:
            self._tell(escaped(found.text), pieces)
        else:
            self._texts.append(found.text)
        if not found.mark:
            return False
        element = self._elements.pop()
        shown = '"' if self._is_text else _leaf("".join(self._texts), element.schema)
        self._texts.clear()
        self._tell(shown, pieces)
        self._place = _Place.ELEMENT
        return True

    def _read_closing(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """In the tag that ends an element of elements."""
        if self._read_until(tape, self._tag_end) is None:
            return False
        element = self._elements.pop()
        self._tell("]" if element.bracket == "[" else "}", pieces)
        self._place = _Place.ELEMENT
        if not self._elements:
            self.num_calls += 1
            self._place = _Place.CALL
        return True

    def _break_off(self, pieces: list[CallPiece]) -> bool:
        """What follows does not belong to the call that was told."""
        ends = ("]" if element.bracket == "[" else "}" for element in reversed(self._elements))
        self._tell("".join(ends), pieces)
        self.num_calls += 1
        self.is_done = True
        return False


def _leaf(text: str, schema: Any) -> str:
    """An element without elements: of its schema's kind where it is empty."""
    if text.strip() or not isinstance(schema, dict):
        return json_of(text)
    return {"array": "[]", "object": "{}"}.get(schema.get("type"), json_of(text))  # pyright: ignore
