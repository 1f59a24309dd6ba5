"""What readers of tool calls have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NoReturn, Protocol

from engine.text.tape import Tape


@dataclass(frozen=True)
class CallPiece:
    """What a call grew by. `name` and `call_id` are in its first piece alone."""

    index: int
    arguments: str
    name: str = ""
    call_id: str = ""


class SectionReader(Protocol):
    """Reads one section of calls from behind its opening mark. `num_calls` counts all told so far."""

    num_calls: int
    is_done: bool

    def read(self, tape: Tape) -> list[CallPiece]:
        """Reads as far as the tape tells, and returns what that added to calls."""
        ...


class StepReader(ABC):
    """Implements `SectionReader` by steps, each from one place of the format to the next."""

    num_calls: int
    is_done: bool

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.is_done = False

    def read(self, tape: Tape) -> list[CallPiece]:
        """Reads as far as the tape tells, and returns what that added to calls."""
        pieces: list[CallPiece] = []
        while not self.is_done and self._step(tape, pieces):
            pass
        return pieces

    @abstractmethod
    def _step(self, tape: Tape, pieces: list[CallPiece]) -> bool:
        """Reads on from where the reader is; False where only more text could tell."""


def escaped(text: str) -> str:
    """Returns a text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of(text: str) -> str:
    """Returns a text as it stands where it is JSON, as a JSON string where it is not."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
