"""One section of tool calls, read while it arrives.

Arguments are passed on as they are written. A call is told as soon as its name is known, with the
brace that its arguments will open with, as the peer does. What is no call of the format is left to
be content: a grammar keeps a model from writing it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine.text.chat_format import ToolFormat

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class CallPiece:
    """What a call grew by. `name` and `call_id` are in its first piece alone."""

    index: int
    arguments: str
    name: str = ""
    call_id: str = ""


class CallReader:
    """Reads the calls behind one opening mark. `rest` is the text behind the section."""

    def __init__(self, tools: ToolFormat, first_index: int = 0) -> None:
        self._tools = tools
        self._index = first_index
        self._text = ""
        self._name = ""
        self._id = ""
        self._value: JsonEnd | None = None
        self._is_told = False
        self._is_opening = False
        self._is_behind_call = False
        self.is_done = False
        self.rest = ""

    def next(self) -> CallReader:
        """Returns the reader of the next section, whose calls go on counting."""
        return CallReader(self._tools, self._index)

    def push(self, text: str) -> list[CallPiece]:
        """Takes text and returns what it added to calls."""
        self._text += text
        pieces: list[CallPiece] = []
        while not self.is_done and self._step(pieces):
            pass
        return pieces

    def _step(self, pieces: list[CallPiece]) -> bool:
        if self._value is not None:
            return self._read_arguments(pieces)
        if self._is_behind_call:
            return self._read_end()
        return self._read_tagged(pieces) if self._tools.name_end else self._read_members(pieces)

    def _read_tagged(self, pieces: list[CallPiece]) -> bool:
        name, mark, rest = self._text.partition(self._tools.name_end)
        if not mark:
            return False
        if self._tools.id_start:
            name, _, self._id = name.partition(self._tools.id_start)
        if self._tools.note_start:
            name, _, _ = name.partition(self._tools.note_start)
        self._name = name.strip()
        self._tell(pieces)
        self._begin(rest.lstrip(_SPACE))
        return True

    def _tell(self, pieces: list[CallPiece]) -> None:
        """Tells of a call, once."""
        if not self._is_told:
            pieces.append(CallPiece(self._index, "{", self._name, self._id))
            self._is_told = True

    def _read_members(self, pieces: list[CallPiece]) -> bool:
        """Reads the members of a call up to its arguments; False if they are not all there."""
        at = _skip(self._text, 0)
        if self._tools.is_list and self._text[at : at + 1] in ("[", ","):
            at = _skip(self._text, at + 1)
        if at >= len(self._text):
            return False
        if self._text[at] != "{":
            return self._give_up()
        at = _skip(self._text, at + 1)
        while True:
            key = _read_string(self._text, at)
            if key is None:
                return False
            name, at = key
            at = _skip(self._text, at)
            if self._text[at : at + 1] != ":":
                return at < len(self._text) and self._give_up()
            at = _skip(self._text, at + 1)
            if name == self._tools.arguments_key:
                if at >= len(self._text):
                    return False
                self._tell(pieces)
                self._begin(self._text[at:])
                return True
            value = _read_string(self._text, at)
            if value is None:
                return False
            text, at = value
            if name == self._tools.name_key:
                self._name = text
                self._tell(pieces)
            elif name == self._tools.id_key:
                self._id = text
            at = _skip(self._text, at)
            if self._text[at : at + 1] != ",":
                return at < len(self._text) and self._give_up()
            at = _skip(self._text, at + 1)

    def _begin(self, rest: str) -> None:
        self._text, self._value, self._is_opening = rest, JsonEnd(), True

    def _read_arguments(self, pieces: list[CallPiece]) -> bool:
        assert self._value is not None
        if self._is_opening:
            self._text = self._text.lstrip(_SPACE)
            if not self._text:
                return False
        end = self._value.find(self._text)
        arguments = self._text if end is None else self._text[:end]
        self._text = self._text[len(arguments) :]
        if self._is_opening and arguments:
            # The brace was told with the name.
            arguments, self._is_opening = arguments.removeprefix("{"), False
        if arguments:
            pieces.append(CallPiece(self._index, arguments))
        if end is None:
            return False
        self._value, self._is_behind_call, self._is_told = None, True, False
        self._index += 1
        self._name = self._id = ""
        return True

    def _read_end(self) -> bool:
        """Reads from a call's arguments to the next call, or past the section."""
        behind_object = 0 if self._tools.name_end else self._object_end()
        if behind_object is None:
            return False
        at = _skip(self._text, behind_object)
        following = self._text[at : at + 1]
        if self._tools.is_list and following == ",":
            self._text, self._is_behind_call = self._text[at:], False
            return True
        if self._tools.is_list:
            if not following:
                return False
            at = _skip(self._text, at + 1) if following == "]" else at
        end = self._tools.end
        behind = self._text[at:]
        if end and len(behind) < len(end) and end.startswith(behind):
            return False
        self.rest = behind.removeprefix(end)
        self.is_done = True
        return True

    def _object_end(self) -> int | None:
        """Passes over what follows the arguments in a call's object; None if it is not all there."""
        at = _skip(self._text, 0)
        while self._text[at : at + 1] == ",":
            for _ in range(2):
                part = _read_string(self._text, _skip(self._text, at + 1))
                if part is None:
                    return None
                at = _skip(self._text, part[1])
        if at >= len(self._text):
            return None
        return at + (self._text[at] == "}")

    def _give_up(self) -> bool:
        """What follows is no call: it is left to be content."""
        self.rest, self.is_done = self._text, True
        return True


class JsonEnd:
    """Finds the end of a JSON object or list that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Returns how much of a piece belongs to the value; None if all of it does so far."""
        for at, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + (self._depth == 0)
        return None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _read_string(text: str, at: int) -> tuple[str, int] | None:
    """Reads a JSON string, or a bare word; None if it is not complete."""
    if text[at : at + 1] != '"':
        end = at
        while end < len(text) and text[end] not in ",}:" + _SPACE:
            end += 1
        return (text[at:end], end) if at < end < len(text) else None
    end = at + 1
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        return None
    try:
        return json.loads(text[at : end + 1]), end + 1
    except ValueError:
        return text[at + 1 : end], end + 1
