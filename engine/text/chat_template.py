"""A model's chat template: messages in, prompt text out, as llama.cpp renders them.

Source: llama.cpp `common_chat_template_direct_apply`. Knows no tokenizer; the texts of BOS and EOS
are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

from engine.errors import TemplateError
from engine.text.messages import Message, TemplateCaps, shape_messages
from engine.text.template_budget import Budget
from engine.text.template_caps import preserved_reasoning, probe_template
from engine.text.template_sandbox import TemplateSandbox

_MAX_TIME_FORMAT = 256
_LINE_END = re.compile("\r\n?")


class ChatTemplate:
    """A compiled template. Immutable after construction, so any number of threads may share it.

    `source` is what Jinja reads of it: every line end is a newline, a last one is left out.

    `adds_bos` and `adds_eos` say what tokenising will add to the prompt; a template that writes
    the same text at that end has it taken away. `now` is what `strftime_now` shows.

    Raises:
        TemplateError: the source is no template, or too long.
    """

    def __init__(
        self,
        source: str,
        bos_text: str = "",
        eos_text: str = "",
        *,
        adds_bos: bool = False,
        adds_eos: bool = False,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = _LINE_END.sub("\n", source).removesuffix("\n")
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._adds_bos = adds_bos
        self._adds_eos = adds_eos
        self._now = now
        functions = {"raise_exception": _raise_exception, "strftime_now": _clock(now)}
        repaired = _repair(source)
        self._sandbox = TemplateSandbox(functions)
        self._template = self._sandbox.compile(repaired)
        self.caps: TemplateCaps = probe_template(repaired, functions)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation; messages are shaped to the template's capabilities first.

        `extra` are further variables, over the standard ones. `preserve_reasoning` and
        `reasoning_effort` among them also get the other names that templates know them by.

        Raises:
            TemplateError: the template fails, refuses the messages, or does not come to an end.
            InvalidField: a message does not fit the template.
        """
        variables: dict[str, Any] = {
            "messages": shape_messages(messages, self.caps, self.source),
            "bos_token": self._bos_text,
            "eos_token": self._eos_text,
            "enable_thinking": True,
            "datetime": self._now().strftime("%b %d %Y"),
            "date_string": self._now().strftime("%d %b %Y"),
        }
        if tools:
            variables["tools"] = tools
        variables = {**_aliases(extra or {}), **variables, **(extra or {})}
        if add_generation_prompt:
            variables["add_generation_prompt"] = True
        budget = Budget(variables.values())
        # Templates may append to lists, which must not be the caller's.
        text = self._trim(self._sandbox.run(self._template, deepcopy(variables), budget))
        return _mended(text, self.source, opens_turn=add_generation_prompt)

    def _trim(self, text: str) -> str:
        if self._adds_bos and self._bos_text:
            text = text.removeprefix(self._bos_text)
        if self._adds_eos and self._eos_text:
            text = text.removesuffix(self._eos_text)
        return text


# What templates write at the end of a prompt, and what it should be: a mark of the template, whether a
# turn is opened, the end, and what it becomes.
_ENDS = (
    ("'<|tool_call>call:'", True, "<turn|>\n", "<turn|>\n<|turn>model\n"),
    ("<|channel|>", False, "<|return|>", "<|end|>"),
)


def _mended(text: str, source: str, *, opens_turn: bool) -> str:
    for mark, is_for_turn, end, becomes in _ENDS:
        if mark in source and opens_turn == is_for_turn and text.endswith(end):
            return text.removesuffix(end) + becomes
    return text


def _aliases(extra: Mapping[str, Any]) -> dict[str, Any]:
    aliases: dict[str, Any] = {}
    preserve = extra.get("preserve_reasoning")
    if isinstance(preserve, bool):
        aliases.update(preserved_reasoning(preserve))
    if isinstance(extra.get("reasoning_effort"), str):
        aliases["reasoning_strength"] = extra["reasoning_effort"]
    return aliases


# Conditions of well-known templates that fail on, or refuse, messages which llama.cpp accepts.
_REPAIRS = (
    '{%- if "<|channel|>analysis<|message|>" in message.content or '
    '"<|channel|>final<|message|>" in message.content %}',
    "{%- if (message['content'] is none or message['content'] == '' or "
    "message['content']|length == 0) and (message['tool_calls'] is not defined or "
    "message['tool_calls'] is none or message['tool_calls']|length == 0) %}",
)


def _repair(source: str) -> str:
    for condition in _REPAIRS:
        source = source.replace(condition, "{%- if false %}")
    return source


def _raise_exception(message: object = "") -> NoReturn:
    raise TemplateError(str(message))


def _clock(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(time_format: str) -> str:
        if len(time_format) > _MAX_TIME_FORMAT:
            raise TemplateError(f"a time format has more than {_MAX_TIME_FORMAT} characters")
        return now().strftime(time_format)

    return strftime_now
