"""One section of calls whose names, and maybe parameters, stand between tags, read as it arrives.

A call is told as soon as its name is known, a parameter once it is whole. White space around tags
is passed over. What is no call of the format is left to be content.

Source: llama.cpp `common_chat_peg_mapper`, for how parameters become JSON.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from engine.text.call_reader import CallPiece, JsonEnd
from engine.text.chat_format import TaggedFormat
from engine.text.parameter_kinds import Kind, ParameterKinds

_SPACE = " \t\r\n"
_NAME_END = re.compile(r"[\s<]")
_NUMBER = re.compile(r":[0-9]+\Z")


class _Place(Enum):
    CALL = auto()
    NAME = auto()
    JSON = auto()
    PARAMETER = auto()
    END = auto()


class TaggedReader:
    """Reads the calls behind one opening mark. `rest` is the text behind the section."""

    def __init__(self, tools: TaggedFormat, kinds: ParameterKinds, first_index: int = 0) -> None:
        self._tools = tools
        self._kinds = kinds
        self._index = first_index
        self._text = ""
        self._place = _Place.CALL
        self._name = ""
        self._num_parameters = 0
        self._json = JsonEnd()
        self._is_opening = False
        self.is_done = False
        self.rest = ""

    def next(self) -> TaggedReader:
        """Returns the reader of the next section, whose calls go on counting."""
        return TaggedReader(self._tools, self._kinds, self._index)

    def push(self, text: str) -> list[CallPiece]:
        """Takes text and returns what it added to calls."""
        self._text += text
        pieces: list[CallPiece] = []
        while not self.is_done and self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[CallPiece]) -> bool:
        match self._place:
            case _Place.CALL:
                return self._read_call()
            case _Place.NAME:
                return self._read_name(pieces)
            case _Place.JSON:
                return self._read_json(pieces)
            case _Place.PARAMETER:
                return self._read_parameter(pieces)
            case _Place.END:
                return self._read_end(pieces)

    def _read_call(self) -> bool:
        """Before a call, or the end of the section."""
        tools, text = self._tools, self._text.lstrip(_SPACE)
        if tools.end and text.startswith(tools.end):
            return self._finish(text[len(tools.end) :])
        if tools.call_start and text.startswith(tools.call_start):
            self._text, self._place = text[len(tools.call_start) :], _Place.NAME
            return True
        marks = (tools.end, tools.call_start)
        if not text or any(mark and mark.startswith(text) for mark in marks):
            return False
        if tools.call_start:
            return self._finish(self._text)
        self._text, self._place = text, _Place.NAME
        return True

    def _read_name(self, pieces: list[CallPiece]) -> bool:
        tools = self._tools
        if tools.name_end:
            name, mark, rest = self._text.partition(tools.name_end)
            if not mark:
                return False
        else:
            found = _NAME_END.search(self._text)
            if found is None:
                return False
            name, rest = self._text[: found.start()], self._text[found.start() :]
        call_id = f"{tools.id_start}{name.strip()}" if tools.id_start else ""
        self._name = _NUMBER.sub("", name.strip()) if call_id else name.strip()
        self._text, self._num_parameters = rest, 0
        pieces.append(CallPiece(self._index, "{", self._name, call_id))
        self._place = _Place.PARAMETER if tools.parameter else _Place.JSON
        self._json, self._is_opening = JsonEnd(), True
        return True

    def _read_json(self, pieces: list[CallPiece]) -> bool:
        if self._is_opening:
            self._text = self._text.lstrip(_SPACE)
            if not self._text:
                return False
            if not self._text.startswith("{"):
                return self._finish(self._text)
        end = self._json.find(self._text)
        arguments = self._text if end is None else self._text[:end]
        self._text = self._text[len(arguments) :]
        # The brace was told with the name.
        told = arguments[1:] if self._is_opening else arguments
        self._is_opening = False
        if told:
            pieces.append(CallPiece(self._index, told))
        if end is not None:
            self._place = _Place.END
        return end is not None

    def _read_parameter(self, pieces: list[CallPiece]) -> bool:
        tags = self._tools.parameter
        assert tags is not None
        text = self._text.lstrip(_SPACE)
        closing = self._tools.call_end or self._tools.end
        if text.startswith(closing):
            pieces.append(CallPiece(self._index, "}"))
            self._text, self._place = text, _Place.END
            return True
        if not text.startswith(tags.start):
            if any(mark.startswith(text) for mark in (closing, tags.start)):
                return False
            return self._finish(self._text)
        name, has_name, behind = text[len(tags.start) :].partition(tags.name_end)
        value, has_value, rest = behind.partition(tags.end)
        if not (has_name and has_value):
            return False
        if tags.value_start:
            value = value.lstrip(_SPACE).removeprefix(tags.value_start)
        name = name.strip()
        kind = self._kinds.kind(self._name, name)
        for mark, marked in zip(tags.kind_marks or (), (Kind.STRING, Kind.JSON), strict=False):
            if value.startswith(mark):
                value, kind = value.removeprefix(mark), marked
        shown = _json(value, kind)
        comma = "," if self._num_parameters else ""
        member = f"{comma}{json.dumps(name, ensure_ascii=False)}:{shown}"
        pieces.append(CallPiece(self._index, member))
        self._text, self._num_parameters = rest, self._num_parameters + 1
        return True

    def _read_end(self, pieces: list[CallPiece]) -> bool:
        """Behind a call's arguments."""
        del pieces
        text, mark = self._text.lstrip(_SPACE), self._tools.call_end
        if mark and len(text) < len(mark) and mark.startswith(text):
            return False
        self._text, self._place = text.removeprefix(mark), _Place.CALL
        self._index += 1
        return True

    def _finish(self, rest: str) -> bool:
        self.rest, self.is_done = rest, True
        return True


def _json(value: str, kind: Kind) -> str:
    """A parameter's text as JSON: one line end next to each of its tags belongs to these."""
    text = value.removeprefix("\n").removesuffix("\n")
    if kind is Kind.STRING:
        return json.dumps(text, ensure_ascii=False)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()
