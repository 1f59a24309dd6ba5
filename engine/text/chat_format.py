"""How families of chat models write reasoning and tool calls: data, one row per family.

A family is known by what its template must contain. Adding one is adding a row.

Source: the templates in llama.cpp's `models/templates`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


@dataclass(frozen=True)
class ReasoningTags:
    """The texts around reasoning, and what else a template writes beside them.

    `start_gap` follows `start`, `end_lead` is in front of `end` and `end_gap` behind it.
    """

    start: str
    end: str
    start_gap: str = ""
    end_lead: str = ""
    end_gap: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `start`, the call, `end`; one after another, or in one JSON list.

    A call is a JSON object with the tool's name and its arguments under these keys, or, where
    `name_end` is given, the bare name, maybe `id_start` and an id, `name_end`, and the arguments.
    From `note_start` on the name has a note that says nothing. `is_list`: one section holds a list of
    calls. `lead` belongs to `start` where it is before it.
    """

    start: str
    end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    name_end: str = ""
    id_start: str = ""
    note_start: str = ""
    is_list: bool = False
    lead: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content."""
        return (self.start, self.end)


@dataclass(frozen=True)
class ParameterTags:
    """The texts around a parameter: `start`, its name, `name_end`, its value, `end`.

    `value_start` comes before the value, with white space before it. Of `kind_marks` the first is
    before texts and the second before JSON, if there are any.
    """

    start: str
    name_end: str
    end: str
    value_start: str = ""
    kind_marks: tuple[str, str] | None = None


@dataclass(frozen=True)
class TaggedFormat:
    """How calls are written between tags: `start`, calls, `end`.

    A call is `call_start`, the tool's name, `name_end`, its arguments, `call_end`. No `name_end`:
    white space or a tag ends the name. `lead` belongs to `start` where it is before it. Without `parameter` the arguments are a JSON object. With
    `id_start` a colon and the call's number follow the name, and all that together is its id.
    """

    start: str
    end: str
    call_start: str = ""
    name_end: str = ""
    call_end: str = ""
    parameter: ParameterTags | None = None
    id_start: str = ""
    lead: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that tell calls from content, and their parts apart."""
        return (self.start, self.end, self.call_start, self.name_end, self.call_end)


class LeadingSpace(Enum):
    """What becomes of white space before a text."""

    # Dropped before the message, and what the template itself writes behind a tag of reasoning.
    TEMPLATE = auto()
    KEPT = auto()
    DROPPED = auto()


@dataclass(frozen=True)
class ChatFormat:
    """A family. Its templates contain all of the texts `marks`, and none of `without`.

    `content_start` opens content that no reasoning precedes.
    """

    name: str
    marks: tuple[str, ...] = ()
    tools: ToolFormat | TaggedFormat | None = None
    reasoning: ReasoningTags | None = None
    without: tuple[str, ...] = ()
    content_start: str = ""
    leading_space: LeadingSpace = LeadingSpace.TEMPLATE

    def fits(self, template: str) -> bool:
        """Says whether a template is one of the family's."""
        has_all = all(mark in template for mark in self.marks)
        return has_all and not any(mark in template for mark in self.without)


# The bar of DeepSeek's tokens.
_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"
THINK = ReasoningTags("<think>", "</think>")


def _dsml(section: str) -> TaggedFormat:
    """DeepSeek's markup from V3.2 on: each parameter says whether it is a text."""
    return TaggedFormat(
        f"<{_DSML}{section}>",
        f"</{_DSML}{section}>",
        call_start=f'<{_DSML}invoke name="',
        name_end='">',
        call_end=f"</{_DSML}invoke>",
        parameter=ParameterTags(
            f'<{_DSML}parameter name="',
            '" string="',
            f"</{_DSML}parameter>",
            kind_marks=('true">', 'false">'),
        ),
        lead="\n\n",
    )


# Nothing is told apart.
PLAIN = ChatFormat("content")

# The more particular come first.
FAMILIES: tuple[ChatFormat, ...] = (
    ChatFormat(
        "kimi-k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions."),
        TaggedFormat(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            call_start="<|tool_call_begin|>functions.",
            name_end="<|tool_call_argument_begin|>",
            call_end="<|tool_call_end|>",
            id_start="functions.",
        ),
        THINK,
        leading_space=LeadingSpace.KEPT,
    ),
    ChatFormat(
        "deepseek-r1",
        (f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁sep{_BAR}>", "```json"),
        TaggedFormat(
            f"<{_BAR}tool▁calls▁begin{_BAR}>",
            f"<{_BAR}tool▁calls▁end{_BAR}>",
            call_start=f"<{_BAR}tool▁call▁begin{_BAR}>function<{_BAR}tool▁sep{_BAR}>",
            name_end="\n```json\n",
            call_end=f"```<{_BAR}tool▁call▁end{_BAR}>",
        ),
        THINK,
    ),
    ChatFormat(
        "deepseek-v3.1",
        (f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁sep{_BAR}>"),
        TaggedFormat(
            f"<{_BAR}tool▁calls▁begin{_BAR}>",
            f"<{_BAR}tool▁calls▁end{_BAR}>",
            call_start=f"<{_BAR}tool▁call▁begin{_BAR}>",
            name_end=f"<{_BAR}tool▁sep{_BAR}>",
            call_end=f"<{_BAR}tool▁call▁end{_BAR}>",
        ),
        THINK,
    ),
    ChatFormat("deepseek-v3.2", (_DSML, "function_calls>"), _dsml("function_calls"), THINK),
    ChatFormat("deepseek-v4", (_DSML, "tool_calls>"), _dsml("tool_calls"), THINK),
    ChatFormat(
        "nemotron-v2",
        ("<TOOLCALL>", "</TOOLCALL>"),
        ToolFormat("<TOOLCALL>", "</TOOLCALL>", is_list=True),
        THINK,
    ),
    ChatFormat(
        "gigachat-3",
        ("<|message_sep|>", "'role': 'function call'"),
        ToolFormat("<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    ),
    ChatFormat("gigachat-3.1", ("<|function_call|>",), ToolFormat("<|function_call|>")),
    ChatFormat(
        "minimax-m2",
        ("<minimax:tool_call>", "<invoke name=", "<parameter name="),
        TaggedFormat(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            call_start='<invoke name="',
            name_end='">',
            call_end="</invoke>",
            parameter=ParameterTags('<parameter name="', '">', "</parameter>"),
        ),
        THINK,
    ),
    ChatFormat(
        "seed-oss",
        ("<seed:tool_call>", "<function=", "<parameter="),
        TaggedFormat(
            "<seed:tool_call>",
            "</seed:tool_call>",
            call_start="<function=",
            name_end=">",
            call_end="</function>",
            parameter=ParameterTags("<parameter=", ">", "</parameter>"),
        ),
        ReasoningTags("<seed:think>", "</seed:think>"),
    ),
    ChatFormat(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        TaggedFormat(
            "<tool_call>",
            "</tool_call>",
            call_start="<function=",
            name_end=">",
            call_end="</function>",
            parameter=ParameterTags("<parameter=", ">", "</parameter>"),
        ),
        leading_space=LeadingSpace.DROPPED,
    ),
    ChatFormat(
        "glm-4",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        TaggedFormat(
            "<tool_call>",
            "</tool_call>",
            parameter=ParameterTags("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>"),
        ),
        THINK,
        without=("<role>ASSISTANT</role>",),
    ),
    ChatFormat(
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        ToolFormat(
            "<|channel|>commentary to=functions.",
            name_end="<|message|>",
            note_start="<|constrain|>",
            lead="<|start|>assistant",
        ),
        reasoning=ReasoningTags(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            end_gap="<|start|>assistant<|channel|>final<|message|>",
        ),
        content_start="<|channel|>final<|message|>",
    ),
    ChatFormat(
        "ministral-3",
        ("[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]"),
        ToolFormat("[TOOL_CALLS]", name_end="[ARGS]"),
        ReasoningTags("[THINK]", "[/THINK]"),
        without=("[CALL_ID]",),
    ),
    ChatFormat(
        "command-r7b",
        ("<|START_ACTION|>", "<|END_ACTION|>", "tool_name"),
        ToolFormat(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            name_key="tool_name",
            arguments_key="parameters",
            id_key="tool_call_id",
            is_list=True,
        ),
        ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    ChatFormat(
        "mistral-small-3.2",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ToolFormat("[TOOL_CALLS]", name_end="[ARGS]", id_start="[CALL_ID]"),
    ),
    ChatFormat(
        "mistral-nemo",
        ("[TOOL_CALLS][", '"id": "'),
        ToolFormat("[TOOL_CALLS]", id_key="id", is_list=True),
    ),
    ChatFormat(
        "command-r-plus",
        ("Action:\\n```json", "tool_name", "<|CHATBOT_TOKEN|>"),
        ToolFormat(
            "Action:\n```json\n",
            "```",
            name_key="tool_name",
            arguments_key="parameters",
            is_list=True,
        ),
    ),
    ChatFormat(
        "mistral",
        ("[TOOL_CALLS]", '"name"', '"arguments"'),
        ToolFormat("[TOOL_CALLS]", id_key="id", is_list=True),
    ),
    ChatFormat(
        "functionary-3.1",
        ("<function=", "</function>", "python_tag"),
        ToolFormat("<function=", "</function>", name_end=">"),
    ),
    ChatFormat("firefunction", (" functools[",), ToolFormat(" functools", is_list=True)),
    ChatFormat(
        "granite",
        ("<|tool_call|>", "granite"),
        ToolFormat("<|tool_call|>", is_list=True),
        THINK,
    ),
    ChatFormat(
        "phi", ("<|tool_call|>", "<|/tool_call|>"), ToolFormat("<|tool_call|>", "<|/tool_call|>")
    ),
    ChatFormat(
        "hermes",
        ("<tool_call>", "</tool_call>", '"name"', '"arguments"'),
        ToolFormat("<tool_call>", "</tool_call>"),
    ),
    ChatFormat(
        "llama-3",
        ('"parameters"', "<|start_header_id|>", '{"name"'),
        ToolFormat("", arguments_key="parameters"),
    ),
)


def find_format(template: str) -> ChatFormat:
    """Returns the family of a template; one without calls where none is known.

    Args:
        template: The template's source.
    """
    found = next(
        (family for family in FAMILIES if family.fits(template)),
        PLAIN,
    )
    if found.reasoning is None and THINK.end in template:
        return replace(found, reasoning=THINK)
    return found
