"""How families of chat models write reasoning and tool calls: the shapes that a family is made of.

The families themselves are `engine.text.chat_families`: data, one row each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class ReasoningTags:
    """The texts around reasoning, and what else a template writes beside them.

    `start_gap` follows `start`, `end_lead` is in front of `end` and `end_gap` behind it. A `start` of
    "" has no mark: reasoning goes on from the prompt. `end_leads`: an answer without reasoning may
    begin with `end`. `is_fixed`: the white space is the family's, whatever its templates write.
    """

    start: str
    end: str
    start_gap: str = ""
    end_lead: str = ""
    end_gap: str = ""
    end_leads: bool = False
    is_fixed: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `start`, the call, `end`; one after another, or in one JSON list.

    A call is a JSON object with the tool's name and its arguments under these keys, or, where
    `name_end` is given, the bare name, maybe `id_start` and an id, `name_end`, and the arguments.
    `name_is_key`: the object's one key is the name. From one of `note_starts` on the name has a note
    that says nothing. `is_list`: one section holds a list of calls; `is_row`: one behind the other;
    `is_single`: a message has one call. `is_open`: a prompt ends with `start`. `id_first`: an id comes before
    the name. `lead` belongs to `start` where it is before it, `other_starts` open calls too.
    """

    start: str
    end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_first: bool = False
    name_is_key: bool = False
    name_end: str = ""
    id_start: str = ""
    note_starts: tuple[str, ...] = ()
    is_list: bool = False
    is_row: bool = False
    is_single: bool = False
    is_open: bool = False
    lead: str = ""
    other_starts: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content."""
        return (self.start, self.end)

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that open calls."""
        return (self.start, *self.other_starts)


@dataclass(frozen=True)
class ParameterTags:
    """The texts around a parameter: `start`, its name, `name_end`, its value, `end`.

    `value_start` comes before the value, with white space before it, `gap` on either side of it. Up to
    `head_end` what follows the name says nothing. Of
    `kind_marks` the first is before texts and the second before JSON, if there are any. Between the
    two of `verbatim` a value may hold `end`.
    """

    start: str
    name_end: str
    end: str
    value_start: str = ""
    gap: str = ""
    kind_marks: tuple[str, str] | None = None
    verbatim: tuple[str, str] = ("", "")
    head_end: str = ""


@dataclass(frozen=True)
class TaggedFormat:
    """How calls are written between tags: `start`, calls, `end`.

    A call is `call_start`, the tool's name, `name_end`, its arguments, `call_end`. No `name_end`:
    white space or a tag ends the name. `lead` belongs to `start` where it is before it. Without
    `parameter` the arguments are a JSON object. With `id_start` a colon and the call's number follow
    the name, and all that together is its id. `opens_bare`: `start` may be missing. Before
    `id_end` stands a call's id. Up to `head_end` what follows the name says nothing. From `recipient` to
    `start` the name stands once more. `between` separates sections.
    """

    start: str
    end: str
    call_start: str = ""
    name_end: str = ""
    call_end: str = ""
    parameter: ParameterTags | None = None
    id_start: str = ""
    lead: str = ""
    opens_bare: bool = False
    id_end: str = ""
    head_end: str = ""
    recipient: str = ""
    between: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content, and their parts apart."""
        return (self.start, self.end, self.call_start, self.name_end, self.call_end)

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that open calls."""
        return (self.start, self.call_start) if self.opens_bare else (self.start,)


@dataclass(frozen=True)
class PythonFormat:
    """Calls in the manner of Python: `start`, `[name(key=value, ...), ...]`, `end`."""

    start: str
    end: str
    lead: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content."""
        return (self.start, self.end)

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that open calls."""
        return (self.start,)


@dataclass(frozen=True)
class DictFormat:
    """A call is `start`, the name, a dictionary with bare keys and strings between `quote`, `end`."""

    start: str
    end: str
    quote: str
    lead: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content, and their parts apart."""
        return (self.start, self.end, self.quote)

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that open calls."""
        return (self.start,)


@dataclass(frozen=True)
class ElementFormat:
    """Calls whose arguments are elements, each tag behind `prefix`: `start`, calls, `end`.

    A call is `call_start`, the tool's name, `name_end`, an element per argument, `call_end`.
    """

    start: str
    end: str
    call_start: str
    name_end: str
    call_end: str
    prefix: str
    lead: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content, and their parts apart."""
        return (self.start, self.end, self.prefix)

    @property
    def starts(self) -> tuple[str, ...]:
        """The texts that open calls."""
        return (self.start,)


CallFormat = ToolFormat | TaggedFormat | PythonFormat | DictFormat | ElementFormat


class LeadingSpace(Enum):
    """What becomes of white space before a text."""

    # Dropped before the message, and what the template itself writes behind a tag of reasoning.
    TEMPLATE = auto()
    KEPT = auto()
    DROPPED = auto()


class BlockKind(Enum):
    """What a block of a message is."""

    CONTENT = auto()
    REASONING = auto()
    # Said to nobody.
    NOTHING = auto()


@dataclass(frozen=True)
class Block:
    """A stretch of a message from `start` to one of `ends`; to the message's end without any.

    Up to `head_end` nothing is of the block yet. At one of `stops` it ends too, and they belong to
    what follows. `is_mark`: a text that means nothing, and no block begins. `stays`: where reasoning is
    not read it is content, and without its marks.
    """

    start: str
    kind: BlockKind
    ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    head_end: str = ""
    is_mark: bool = False
    stays: bool = False


@dataclass(frozen=True)
class ChatFormat:
    """A family. Its templates contain all of the texts `marks`, and none of `without`.

    A message either begins with reasoning, maybe, and goes on with content and calls, or reasoning is
    one of its `blocks`. Reasoning also ends at one of `reasoning_stops`, which belong to what follows. What is
    behind the last `turn_start` of a prompt is the beginning of the message. `header` begins each
    block and call of the message. `content_start` opens content that no reasoning precedes. `stops`
    end a generation.
    """

    name: str
    marks: tuple[str, ...] = ()
    tools: CallFormat | None = None
    reasoning: ReasoningTags | None = None
    without: tuple[str, ...] = ()
    content_start: str = ""
    leading_space: LeadingSpace = LeadingSpace.TEMPLATE
    blocks: tuple[Block, ...] = ()
    reasoning_stops: tuple[str, ...] = ()
    turn_start: str = ""
    header: str = ""
    stops: tuple[str, ...] = ()

    @property
    def is_framed(self) -> bool:
        """Whether what a message is made of are blocks, and nothing precedes them."""
        return bool(self.header) or any(block.kind is BlockKind.REASONING for block in self.blocks)

    def fits(self, template: str) -> bool:
        """Says whether a template is one of the family's."""
        has_all = all(mark in template for mark in self.marks)
        return has_all and not any(mark in template for mark in self.without)


THINK = ReasoningTags("<think>", "</think>")
FIXED_THINK = ReasoningTags(
    "<think>", "</think>", start_gap="\n", end_lead="\n", end_gap="\n\n", is_fixed=True
)
# Nothing is told apart.
PLAIN = ChatFormat("content")
