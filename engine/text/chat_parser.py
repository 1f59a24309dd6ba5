"""A chat model's text as a message: reasoning, content and tool calls, while it arrives.

What a piece adds is told at once, but for what may still be part of a tag. All that is told of one
kind, joined, is the message, so a stream and a whole answer are the same.

Example:
    >>> parser = MessageParser(find_format(template), parses_tools=True, reads_reasoning=True)
    >>> parser.push("<think>hm</think>hello") + parser.finish()
    [Reasoning('hm'), Content('hello')]
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from engine.text.answer_reader import AnswerReader
from engine.text.call_reader import CallPiece, CallReader
from engine.text.chat_format import ChatFormat, LeadingSpace, TaggedFormat, ToolFormat
from engine.text.parameter_kinds import ParameterKinds
from engine.text.tagged_reader import TaggedReader

_NO_KINDS = ParameterKinds()


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before it."""

    text: str


Delta = Content | Reasoning | CallPiece


class _Place(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


class MessageParser:
    """The message of one generation. Not shared between threads."""

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        parses_tools: bool,
        reads_reasoning: bool,
        begins_in_reasoning: bool = False,
        gap_is_open: bool = False,
        is_shaped: bool = False,
        kinds: ParameterKinds = _NO_KINDS,
    ) -> None:
        """Begins a message.

        Args:
            chat_format: The model's family.
            parses_tools: Looks for tool calls.
            reads_reasoning: Tells reasoning from content.
            begins_in_reasoning: The prompt has opened the reasoning.
            gap_is_open: It has not written the space behind the opening tag.
            is_shaped: A schema shapes the answer, which may stand in a fence; there are no calls.
            kinds: How the parameters of the tools are written.
        """
        self._tools = chat_format.tools if parses_tools else None
        self._reasoning = chat_format.reasoning if reads_reasoning else None
        # Space before the first word is the template's where there may be reasoning.
        begins_outside = chat_format.reasoning and not begins_in_reasoning
        self._place = _Place.START if begins_outside else _Place.CONTENT
        self._gap = ""
        self._is_gap = True
        self._head = chat_format.content_start
        self._leading_space = chat_format.leading_space
        if self._reasoning and begins_in_reasoning:
            self._place = _Place.REASONING
            self._gap = self._reasoning.start_gap if gap_is_open else ""
        self._held: str = ""
        self._is_trimming = False
        self._calls: CallReader | TaggedReader | None = _reader(self._tools, kinds)
        self._num_call_chars = 0
        self._answer = AnswerReader() if is_shaped else None

    def push(self, text: str) -> list[Delta]:
        """Takes text and returns what it added."""
        self._held += text
        deltas: list[Delta] = []
        while self._advance(deltas, is_last=False):
            pass
        return _joined(deltas)

    def finish(self) -> list[Delta]:
        """Returns what was held back: no more text will come."""
        deltas: list[Delta] = []
        while self._advance(deltas, is_last=True):
            pass
        return _joined(deltas)

    def _advance(self, deltas: list[Delta], *, is_last: bool) -> bool:
        """Moves on by one place; True if there may be more to do."""
        match self._place:
            case _Place.START:
                return self._start(is_last=is_last)
            case _Place.REASONING:
                return self._reason(deltas, is_last=is_last)
            case _Place.CONTENT:
                return self._content(deltas, is_last=is_last)
            case _Place.CALLS:
                return self._call(deltas, is_last=is_last)

    def _start(self, *, is_last: bool) -> bool:
        """Before the first word: reasoning, or not."""
        keeps_space = self._leading_space is LeadingSpace.KEPT
        text = self._held if keeps_space else self._held.lstrip()
        tag = self._reasoning.start if self._reasoning else ""
        if self._reasoning and text.startswith(tag):
            self._held, self._gap = text[len(tag) :], self._reasoning.start_gap
            self._place = _Place.REASONING
            return True
        if not is_last and any(mark.startswith(text) for mark in (tag, self._head)):
            return False
        self._held, self._place = text.removeprefix(self._head), _Place.CONTENT
        return True

    def _reason(self, deltas: list[Delta], *, is_last: bool) -> bool:
        assert self._reasoning is not None
        if not self._pass_gap(is_last=is_last):
            return False
        found = self._take_until(self._reasoning.end, is_last=is_last)
        if found.text:
            deltas.append(Reasoning(found.text))
        if found.is_complete:
            self._place, self._gap, self._is_gap = _Place.CONTENT, self._reasoning.end_gap, True
        return found.is_complete

    def _pass_gap(self, *, is_last: bool) -> bool:
        """Passes over the space that a template writes here; False if it is not all there."""
        if self._leading_space is LeadingSpace.KEPT:
            return True
        if self._leading_space is LeadingSpace.DROPPED:
            self._held = self._held.lstrip() if self._is_gap else self._held
            self._is_gap = self._is_gap and not self._held
            return not self._is_gap or is_last
        if not is_last and self._gap.startswith(self._held) and self._held != self._gap:
            return False
        self._held, self._gap = self._held.removeprefix(self._gap), ""
        return True

    def _content(self, deltas: list[Delta], *, is_last: bool) -> bool:
        if not self._pass_gap(is_last=is_last):
            return False
        if self._is_trimming:
            self._held = self._held.lstrip()
            self._is_trimming = not self._held
        if self._answer is not None:
            text, self._held = self._answer.push(self._held), ""
            found = _Found(text + self._answer.finish() if is_last else text, is_complete=False)
        elif self._tools is None:
            found = _Found(self._held, is_complete=False)
            self._held = ""
        elif self._tools.start:
            tools = self._tools
            found = self._take_until(tools.start, is_last=is_last, lead=tools.lead)
        else:
            found = self._take_bare(is_last=is_last)
        if found.text:
            deltas.append(Content(found.text))
        if found.is_complete:
            self._place = _Place.CALLS
        return found.is_complete

    def _take_bare(self, *, is_last: bool) -> _Found:
        """A call without a mark is the whole message: it begins with a brace."""
        text = self._held.lstrip()
        if text.startswith("{"):
            self._held = text
            return _Found("", is_complete=True)
        if text or is_last:
            found = _Found(self._held, is_complete=False)
            self._held, self._tools = "", None
            return found
        return _Found("", is_complete=False)

    def _call(self, deltas: list[Delta], *, is_last: bool) -> bool:
        assert self._calls is not None
        deltas += self._calls.push(self._held)
        self._num_call_chars += len(self._held)
        self._held = ""
        if not self._calls.is_done:
            return False
        rest = self._calls.rest
        if self._tools is not None and not self._tools.start and len(rest) == self._num_call_chars:
            # Nothing of it was a call. Without a mark it would begin to be one again, for ever.
            self._tools = None
        self._held, self._calls = rest, self._calls.next()
        self._num_call_chars = 0
        self._place, self._is_trimming = _Place.CONTENT, True
        return bool(self._held) or is_last

    def _take_until(self, mark: str, *, is_last: bool, lead: str = "") -> _Found:
        """Takes what comes before a mark, and the mark; what may begin one is left.

        A `lead` right before the mark is part of it.
        """
        at = self._held.find(mark)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            return _Found(text.removesuffix(lead), is_complete=True)
        num_kept = 0
        if not is_last:
            num_kept = max(_overlap(self._held, mark), _overlap(self._held, lead + mark))
        text = self._held[: len(self._held) - num_kept]
        self._held = self._held[len(text) :]
        return _Found(text, is_complete=False)


@dataclass(frozen=True)
class _Found:
    """What was taken, and whether a mark came behind it."""

    text: str
    is_complete: bool


def _reader(
    tools: ToolFormat | TaggedFormat | None, kinds: ParameterKinds
) -> CallReader | TaggedReader | None:
    match tools:
        case None:
            return None
        case ToolFormat():
            return CallReader(tools)
        case TaggedFormat():
            return TaggedReader(tools, kinds)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may begin a mark."""
    return next(
        (n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0
    )


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Joins neighbours of one kind."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + delta.text)
        else:
            result.append(delta)
    return result
