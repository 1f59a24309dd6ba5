"""Reads whole messages, for the tests of what a family's text means."""

from __future__ import annotations

from typing import Any

from engine.text.call_piece import CallPiece
from engine.text.chat_families import FAMILIES
from engine.text.chat_format import ChatFormat
from engine.text.chat_parser import Content, Delta, MessageParser, Reasoning

BY_NAME = {family.name: family for family in FAMILIES}

# Content, reasoning, and the name and arguments of each call.
Message = tuple[str, str, list[tuple[str, str]]]


def message(deltas: list[Delta]) -> Message:
    """Joins what was told."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if isinstance(delta, CallPiece):
            assert (delta.index in names) != bool(delta.name)
            names.setdefault(delta.index, delta.name)
            arguments.setdefault(delta.index, []).append(delta.arguments)
    return content, reasoning, [(names[i], "".join(arguments[i])) for i in sorted(names)]


def parse(chat_format: ChatFormat, *pieces: str, opening: str = "", **options: Any) -> Message:
    """Reads a text in pieces; `opening` is what the prompt holds of the message."""
    told: dict[str, Any] = {"parses_tools": True, "reads_reasoning": True} | options
    parser = MessageParser(chat_format, **told)
    deltas = [delta for piece in (opening, *pieces) for delta in parser.push(piece)]
    return message(deltas + parser.finish())


def cut(text: str, size: int) -> list[str]:
    """Cuts a text into pieces of so many characters."""
    return [text[i : i + size] for i in range(0, len(text), size)]
