from __future__ import annotations

from typing import Any

import pytest

from engine.errors import NotSupported, TemplateError
from engine.text.builtin_templates import CHATML
from engine.text.chat_template import ChatTemplate
from engine.text.turn_template import TurnTemplate

USER = {"role": "user", "content": "Hello there"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def test_a_trailing_assistant_turn_is_closed() -> None:
    # goldens/http/chat_without_jinja.json: 56 prompt tokens, of them 45 of the first turn.
    turns = [USER, {"role": "assistant", "content": "Once"}]
    assert TurnTemplate(CHATML).render(turns, add_generation_prompt=False) == (
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\nOnce<|im_end|>\n"
    )


def test_what_a_template_would_do_beyond_its_format_does_not_happen() -> None:
    source = "{{ raise_exception('no') }}<start_of_turn>{{ bos_token }}"
    assert TurnTemplate(source).render([USER]) == (
        "<start_of_turn>user\nHello there<end_of_turn>\n<start_of_turn>model\n"
    )


def test_content_may_be_parts_or_absent() -> None:
    parts = [{"type": "text", "text": text} for text in ("", "a", "b")]
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": []},
    ]
    assert TurnTemplate("phi3").render(turns, add_generation_prompt=False) == (
        "<|developer|>\na\nb<|end|>\n<|assistant|>\n<|end|>\n<|assistant|>\n<|end|>\n"
    )


def test_a_template_that_is_not_recognised_refuses_to_render() -> None:
    template = TurnTemplate("{{ messages }}")
    with pytest.raises(NotSupported, match="without --jinja"):
        template.render([USER])


def test_tools_have_no_place_in_a_format() -> None:
    with pytest.raises(NotSupported, match="tools"):
        TurnTemplate("llama3").render([USER], tools=[TOOL])


def test_what_is_shown_is_the_jinja_template() -> None:
    template, shown = TurnTemplate(CHATML + "\r\n"), ChatTemplate(CHATML)
    assert (template.source, template.caps) == (shown.source, shown.caps)
    assert TurnTemplate("llama3").source == "llama3"
    with pytest.raises(TemplateError):
        TurnTemplate("<|im_start|>{% if %}")
