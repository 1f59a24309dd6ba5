"""The white space that a chat template writes around reasoning: found by writing some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine.errors import InvalidField, NotSupported, TemplateError
from engine.text.chat_format import ReasoningTags

_REASONING, _CONTENT = "reasoning-of-the-turn", "content-of-the-turn"
_TURNS = (
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": _CONTENT, "reasoning_content": _REASONING},
)


class _Renders(Protocol):
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str: ...


def framed(tags: ReasoningTags, template: _Renders) -> ReasoningTags:
    """Returns the tags with the white space of a template; as they are where it shows none."""
    if not tags.start or tags.is_fixed:
        return tags
    try:
        text = template.render(_TURNS, add_generation_prompt=False)
    except (TemplateError, InvalidField, NotSupported):
        return tags
    before, shown, behind = text.partition(_REASONING)
    between, follows, _ = behind.partition(_CONTENT)
    lead, has_end, gap = between.partition(tags.end)
    _, has_start, start_gap = before.rpartition(tags.start)
    if not (shown and follows and has_end and has_start) or (lead + gap + start_gap).strip():
        return tags
    return replace(tags, start_gap=start_gap, end_lead=lead, end_gap=gap)
