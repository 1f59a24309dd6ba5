"""A chat model's text as a message: reasoning, content and tool calls, while it arrives.

What a piece adds is told at once, but for what may still be part of a tag. All that is told of one
kind, joined, is the message, so a stream and a whole answer are the same.

Example:
    >>> parser = MessageParser(find_format(template), parses_tools=True, reads_reasoning=True)
    >>> parser.push("<think>hm</think>hello") + parser.finish()
    [Reasoning('hm'), Content('hello')]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from engine.text.answer_reader import AnswerReader
from engine.text.call_piece import CallPiece, SectionReader
from engine.text.call_reader import CallReader
from engine.text.chat_format import (
    Block,
    BlockKind,
    CallFormat,
    ChatFormat,
    DictFormat,
    ElementFormat,
    LeadingSpace,
    PythonFormat,
    TaggedFormat,
    ToolFormat,
)
from engine.text.dict_reader import DictReader
from engine.text.element_reader import ElementReader
from engine.text.parameter_kinds import ParameterKinds
from engine.text.python_reader import PythonReader
from engine.text.tagged_reader import TaggedReader
from engine.text.tape import Marks, Tape

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
    HEAD = auto()
    GAP = auto()
    BLOCK = auto()
    BETWEEN = auto()
    CALLS = auto()


class MessageParser:
    """The message of one generation. Not shared between threads."""

    def __init__(
        self,
        chat_format: ChatFormat,
        *,
        parses_tools: bool,
        reads_reasoning: bool,
        is_shaped: bool = False,
        kinds: ParameterKinds = _NO_KINDS,
    ) -> None:
        """Begins a message.

        Args:
            chat_format: The model's family.
            parses_tools: Looks for tool calls.
            reads_reasoning: Tells reasoning from content.
            is_shaped: A schema shapes the answer, which may stand in a fence; there are no calls.
            kinds: How the parameters of the tools are written.
        """
        self._format = chat_format
        self._kinds = kinds
        self._tools = chat_format.tools if parses_tools and not is_shaped else None
        self._thought = _thought(chat_format) if reads_reasoning else None
        self._blocks = _blocks_by_mark(chat_format, reads_reasoning=reads_reasoning)
        self._call_marks = _call_marks(chat_format, self._tools)
        self._between = Marks([*self._blocks, *self._call_marks])
        self._start = Marks(self._start_marks())
        self._tape = Tape()
        # Space before the first word is the template's where there may be reasoning.
        has_no_start = chat_format.reasoning is None and (
            chat_format.leading_space is not LeadingSpace.DROPPED
        )
        begins_between = chat_format.is_framed or has_no_start
        self._place = _Place.BETWEEN if begins_between else _Place.START
        self._block: Block | None = None
        # Reasoning that is not told apart is shown as it stands.
        self._is_raw = not reads_reasoning
        self._block_marks = self._head_end = self._between
        self._gap = ""
        # White space that reasoning began with, until it holds more.
        self._blank: str | None = None
        self._is_trimming = False
        self._section: SectionReader | None = None
        self._section_mark = ""
        self._has_called = False
        self._num_calls = 0
        self._answer = AnswerReader() if is_shaped else None
        # Of what is held back, how much the client has already.
        self._num_known = 0

    def resume(self, opening: str) -> None:
        """Takes the beginning of a message that the client has already; first, if at all."""
        answer, self._answer = self._answer, None
        self.push(opening)
        self._answer = answer
        self._num_known = self._tape.num_left

    def push(self, text: str) -> list[Delta]:
        """Takes text and returns what it added."""
        self._tape.push(text)
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return _joined(deltas)

    def finish(self) -> list[Delta]:
        """Returns what was held back: no more text will come."""
        self._tape.is_last = True
        deltas = self.push("")
        if self._place is _Place.CALLS and not self._has_called:
            self._tell(self._section_mark + self._tape.give_back(), deltas)
        if self._answer is not None and (rest := self._answer.finish()):
            deltas.append(Content(rest))
        return _joined(deltas)

    @property
    def num_held(self) -> int:
        """How many characters wait for more to tell what they are."""
        return self._tape.num_left

    def _start_marks(self) -> list[str]:
        start = self._format.content_start
        marks = [] if start in self._blocks else [start]
        if self._thought is not None and self._format.reasoning is not None:
            marks.append(self._thought.start)
            marks += self._thought.ends if self._format.reasoning.end_leads else ()
        return marks

    def _advance(self, deltas: list[Delta]) -> bool:
        """Moves on by one place; True if there may be more to do."""
        match self._place:
            case _Place.START:
                return self._read_start()
            case _Place.HEAD:
                return self._read_head()
            case _Place.GAP:
                return self._pass_gap()
            case _Place.BLOCK:
                return self._read_block(deltas)
            case _Place.BETWEEN:
                return self._read_between(deltas)
            case _Place.CALLS:
                return self._read_calls(deltas)

    def _read_start(self) -> bool:
        """Before the first word: reasoning, or not."""
        if self._thought is not None and not self._thought.start and not self._tape.is_empty:
            self._enter(self._thought)
            return True
        if self._format.leading_space is not LeadingSpace.KEPT:
            self._tape.skip_space()
        mark = self._tape.meets(self._start)
        if mark is None and not self._tape.is_last:
            return False
        mark = mark or ""
        self._tape.take(len(mark))
        if mark and self._thought is not None and mark == self._thought.start:
            self._enter(self._thought)
        elif mark and self._thought is not None and mark in self._thought.ends:
            self._leave()
        else:
            self._place = _Place.BETWEEN
        return True

    def _enter(self, block: Block) -> None:
        self._block = block
        stops = [
            mark
            for mark in self._between.texts
            if any(mark.startswith(stop) for stop in block.stops)
        ]
        self._block_marks = Marks([*block.ends, *block.stops, *stops])
        self._head_end = Marks([block.head_end])
        self._blank = "" if block.kind is BlockKind.REASONING else None
        is_thought = block.kind is BlockKind.REASONING and not self._is_raw
        reasoning = self._format.reasoning
        self._gap = reasoning.start_gap if is_thought and reasoning else ""
        self._place = _Place.HEAD if block.head_end else _Place.GAP
        if not is_thought and not block.head_end:
            self._place = _Place.BLOCK

    def _read_head(self) -> bool:
        found = self._tape.take_until(self._head_end)
        if found.mark:
            self._place = _Place.BLOCK
        return bool(found.mark)

    def _pass_gap(self) -> bool:
        """Passes over the space that a template writes beside a tag; False if it is not all there."""
        match self._format.leading_space:
            case LeadingSpace.KEPT:
                pass
            case LeadingSpace.DROPPED:
                self._tape.skip_space()
                if self._tape.is_empty:
                    return False
            case LeadingSpace.TEMPLATE:
                while self._gap and not self._tape.is_empty:
                    if self._tape.next_char == self._gap[0]:
                        self._tape.take(1)
                    self._gap = self._gap[1:]
                if self._gap:
                    return False
        self._place = _Place.BETWEEN if self._block is None else _Place.BLOCK
        return True

    def _leave(self) -> None:
        """The block has ended."""
        self._num_known = 0
        block, self._block, self._blank = self._block, None, None
        self._place = _Place.BETWEEN
        reasoning = self._format.reasoning
        was_thought = block is None or block.kind is BlockKind.REASONING
        if reasoning is not None and was_thought and not self._is_raw:
            self._gap = "" if self._format.is_framed else reasoning.end_gap
            self._gap = self._gap if self._gap.isspace() else ""
            self._place = _Place.GAP

    def _read_block(self, deltas: list[Delta]) -> bool:
        assert self._block is not None
        block = self._block
        found = self._tape.take_until(self._block_marks)
        is_raw = self._is_raw and block.kind is BlockKind.REASONING
        match block.kind:
            case BlockKind.REASONING if is_raw:
                self._tell(found.text + (found.mark if found.mark in block.ends else ""), deltas)
            case BlockKind.CONTENT:
                self._tell(found.text, deltas)
            case BlockKind.REASONING:
                self._think(found.text, deltas)
            case BlockKind.NOTHING:
                pass
        if not found.mark:
            return False
        self._leave()
        if found.mark not in block.ends:
            self._place = _Place.BETWEEN
            self._begin(found.mark, deltas)
        return True

    def _think(self, text: str, deltas: list[Delta]) -> None:
        """Tells reasoning that does not consist of white space."""
        if self._blank is not None:
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, None
        text = self._unknown(text)
        if text:
            deltas.append(Reasoning(text))

    def _unknown(self, text: str) -> str:
        """Returns what the client does not have of a text."""
        known, self._num_known = self._num_known, max(0, self._num_known - len(text))
        return text[known:]

    def _tell(self, text: str, deltas: list[Delta]) -> None:
        """Tells content."""
        text = self._unknown(text)
        if self._answer is not None:
            text = self._answer.push(text)
        if text:
            deltas.append(Content(text))

    def _read_between(self, deltas: list[Delta]) -> bool:
        if self._is_trimming:
            self._tape.skip_space()
            self._is_trimming = self._tape.is_empty
        if self._tools is not None and not self._tools.start:
            return self._read_bare(deltas)
        found = self._tape.take_until(self._between)
        self._tell(found.text, deltas)
        if found.mark:
            self._begin(found.mark, deltas)
        return bool(found.mark)

    def _begin(self, mark: str, deltas: list[Delta]) -> None:
        """Begins what a mark opens; one that opens nothing here is content."""
        self._num_known = 0
        block = self._blocks.get(mark)
        if mark in self._call_marks:
            self._begin_calls(mark)
        elif block is None:
            self._tell(mark, deltas)
        elif not block.is_mark:
            if self._is_raw and block.kind is BlockKind.REASONING:
                self._tell(block.start, deltas)
            self._enter(block)

    def _read_bare(self, deltas: list[Delta]) -> bool:
        """A call without a mark is the whole message: it begins with a brace."""
        if not self._has_called:
            self._tape.record()
        self._tape.skip_space()
        if self._tape.next_char == "{":
            self._section_mark = self._tape.give_back()
            self._begin_calls("")
            return True
        blank = self._tape.give_back()
        if self._tape.is_empty and not self._tape.is_last:
            self._tape.push(blank)
            return False
        self._tools = None
        self._tell(blank, deltas)
        return True

    def _begin_calls(self, mark: str) -> None:
        assert self._tools is not None
        opened = self._call_marks.get(mark, mark)
        self._section = _reader(self._tools, self._kinds, opened, self._num_calls)
        self._section_mark = mark or self._section_mark
        self._place, self._has_called = _Place.CALLS, False
        self._tape.record()

    def _read_calls(self, deltas: list[Delta]) -> bool:
        assert self._section is not None
        pieces = self._section.read(self._tape)
        if pieces:
            self._has_called = True
            self._tape.keep()
        deltas += pieces
        if not self._section.is_done:
            return False
        if not self._has_called:
            # Nothing of it was a call. Without a mark it would begin to be one again, for ever.
            self._tools = self._tools if self._call_marks else None
            self._tell(self._section_mark + self._tape.give_back(), deltas)
        self._num_calls = self._section.num_calls
        self._section, self._section_mark = None, ""
        self._place, self._is_trimming = _Place.BETWEEN, self._has_called
        self._has_called = False
        return True


def _thought(chat_format: ChatFormat) -> Block | None:
    """The reasoning that a family's message may begin with."""
    tags = chat_format.reasoning
    if tags is None or chat_format.is_framed:
        return None
    return Block(tags.start, BlockKind.REASONING, (tags.end,), chat_format.reasoning_stops)


def _blocks_by_mark(chat_format: ChatFormat, *, reads_reasoning: bool) -> dict[str, Block]:
    header = chat_format.header
    blocks: dict[str, Block] = {}
    for block in chat_format.blocks:
        stays = block.stays and not reads_reasoning
        shown = replace(block, kind=BlockKind.CONTENT) if stays else block
        blocks[header + block.start] = shown
    if header:
        blocks[header] = Block("", BlockKind.NOTHING, is_mark=True)
    return blocks


def _call_marks(chat_format: ChatFormat, tools: CallFormat | None) -> dict[str, str]:
    """The texts that open calls, each with the one that its format knows it by."""
    if tools is None or not tools.start:
        return {}
    leads = {"", tools.lead}
    has_own_head = isinstance(tools, TaggedFormat) and tools.recipient
    header = "" if has_own_head else chat_format.header
    return {f"{lead}{header}{start}": start for start in tools.starts for lead in leads}


def _reader(tools: CallFormat, kinds: ParameterKinds, mark: str, num_calls: int) -> SectionReader:
    match tools:
        case ToolFormat():
            return CallReader(tools, num_calls)
        case TaggedFormat():
            return TaggedReader(tools, kinds, mark, num_calls)
        case PythonFormat():
            return PythonReader(tools, num_calls)
        case DictFormat():
            return DictReader(tools, num_calls)
        case ElementFormat():
            return ElementReader(tools, kinds, num_calls)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Joins neighbours of one kind."""
    result: list[Delta] = []
    texts: list[str] = []
    for delta in [*deltas, None]:
        last = result[-1] if result else None
        if isinstance(delta, Content | Reasoning) and type(delta) is type(last):
            texts.append(delta.text)
            continue
        if texts and isinstance(last, Content | Reasoning):
            result[-1] = type(last)("".join([last.text, *texts]))
            texts.clear()
        if delta is not None:
            result.append(delta)
    return result
