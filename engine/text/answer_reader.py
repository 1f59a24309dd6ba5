"""An answer that a schema shapes, out of the Markdown fence that a model may put around it.

Knows no JSON: the grammar has seen to that.

Source: llama.cpp `autoparser::build_parser`, its response format.
"""

from __future__ import annotations

import re

FENCE = "```json"
FENCE_END = "```"

_TAIL = re.compile(r"[\s`]*\Z")
_END = re.compile(r"\s*`{0,3}\s*\Z")


class AnswerReader:
    """Takes the text of one answer, in pieces, and tells what stands inside the fence."""

    def __init__(self) -> None:
        self._held = ""
        self._has_begun = False
        self._is_fenced = False

    def push(self, text: str) -> str:
        """Returns what a piece adds; what may be the fence or the space around it is held back."""
        self._held += text
        if not self._has_begun:
            self._begin()
        if not self._has_begun:
            return ""
        tail = _TAIL.search(self._held)
        assert tail is not None
        told, self._held = self._held[: tail.start()], self._held[tail.start() :]
        return told

    def finish(self) -> str:
        """Returns what was held back and belongs to the answer: no more text will come."""
        if not self._has_begun or self._is_fenced:
            return _END.sub("", self._held) if self._has_begun else self._held
        return self._held.rstrip()

    def _begin(self) -> None:
        text = self._held.lstrip()
        if not self._is_fenced and text.startswith(FENCE):
            self._is_fenced, text = True, text[len(FENCE) :].lstrip()
        elif not self._is_fenced and FENCE.startswith(text):
            return
        self._held, self._has_begun = text, bool(text)
