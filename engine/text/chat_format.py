"""How families of chat models write reasoning and tool calls: data, one row per family.

A family is known by what its template must contain. Adding one is adding a row.

Source: the templates in llama.cpp's `models/templates`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """The texts around reasoning."""

    start: str
    end: str


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `start`, the call, `end`; one after another, or in one JSON list.

    A call is a JSON object with the tool's name and its arguments under these keys, or, where
    `name_end` is given, the bare name, `name_end`, and the arguments. `is_list`: one section holds
    a list of calls.
    """

    start: str
    end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    name_end: str = ""
    is_list: bool = False


@dataclass(frozen=True)
class ChatFormat:
    """A family. `marks` are texts that its templates contain, all of them."""

    name: str
    marks: tuple[str, ...] = ()
    tools: ToolFormat | None = None
    reasoning: ReasoningTags | None = None


THINK = ReasoningTags("<think>", "</think>")

# Nothing is told apart.
PLAIN = ChatFormat("content")

# The more particular come first.
FAMILIES: tuple[ChatFormat, ...] = (
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
        (family for family in FAMILIES if all(mark in template for mark in family.marks)),
        PLAIN,
    )
    if found.reasoning is None and THINK.end in template:
        return ChatFormat(found.name, found.marks, found.tools, THINK)
    return found
