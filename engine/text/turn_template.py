"""A chat template that is not run: what it writes is known, by its name or its content.

Knows no vocabulary: these formats spell BOS and EOS themselves, and nothing of them is taken away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import NotSupported
from engine.text.chat_template import ChatTemplate
from engine.text.messages import Message, TemplateCaps, content_text
from engine.text.template_marks import detect_format


class TurnTemplate:
    """A built-in chat format. Immutable after construction.

    `source` and `caps` are those of the same text as a Jinja template, as llama-server shows them.

    Raises:
        TemplateError: the text is no Jinja template, or too long.

    Source: llama.cpp `common_chat_templates_apply_legacy`.
    """

    def __init__(self, source: str) -> None:
        shown = ChatTemplate(source)
        self.source = shown.source
        self.caps: TemplateCaps = shown.caps
        self._format = detect_format(self.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation: its roles and texts; `extra` has no meaning here.

        Raises:
            NotSupported: the template is none of the known ones, or there are tools.
        """
        if self._format is None:
            raise NotSupported("this chat template without --jinja")
        if tools:
            raise NotSupported("tools in a built-in chat format")
        turns = [(message["role"], content_text(message.get("content"))) for message in messages]
        return self._format.write(turns, add_generation_prompt=add_generation_prompt)
