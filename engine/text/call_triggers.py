"""Where in a model's text the grammar of its calls begins to hold.

Source: llama.cpp's `grammar_triggers` of each format.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.text.chat_format import CallFormat, ChatFormat, TaggedFormat, ToolFormat
from engine.text.grammar.lazy import Triggers
from engine.text.grammar.trigger_pattern import escape

# A call without a mark is all of the message, and begins with a brace.
_BARE_CALL = r"^\s*(\{)"


def call_triggers(chat_format: ChatFormat, tools: CallFormat, names: Sequence[str]) -> Triggers:
    """Returns what switches the grammar of a family's calls on.

    Args:
        chat_format: The family.
        tools: How it writes calls.
        names: Of the tools that may be called.
    """
    if not tools.start:
        return Triggers.of(patterns=[_BARE_CALL])
    if isinstance(tools, ToolFormat) and tools.is_open:
        called = _any_of(name + tools.name_end for name in names)
        return Triggers.of(patterns=[f"(?:^|{escape(tools.start)})({called})"])
    if chat_format.header and isinstance(tools, ToolFormat):
        # Elsewhere such a text is one like any other.
        return Triggers.of(
            patterns=[f"(?:^|{escape(chat_format.header)})({_any_of(tools.starts)})"]
        )
    words = [tools.start]
    if isinstance(tools, TaggedFormat) and tools.opens_bare:
        behind = "" if tools.id_start else tools.name_end
        words += [tools.call_start + name + behind for name in names]
    return Triggers.of(words=words)


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(escape, texts))
