from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from engine.errors import TemplateError
from engine.text.builtin_templates import CHATML
from engine.text.chat_template import ChatTemplate
from engine.text.messages import TemplateCaps

TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello there"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {}},
}


class TestRender:
    def test_chatml_as_llama_server_renders_it(self) -> None:
        # goldens/http/chat_without_jinja.json
        assert ChatTemplate(CHATML).render(TURNS) == (
            "<|im_start|>system\nBe kind.<|im_end|>\n"
            "<|im_start|>user\nHello there<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_the_turn_is_opened_on_request(self) -> None:
        text = ChatTemplate(CHATML).render(TURNS, add_generation_prompt=False)
        assert text.endswith("Hello there<|im_end|>\n")

    def test_bos_and_eos_go_where_tokenising_adds_them(self) -> None:
        source = "{{ bos_token }}{{ bos_token }}x{{ eos_token }}"
        template = ChatTemplate(source, "<s>", "</s>", adds_bos=True, adds_eos=True)
        assert template.render(TURNS) == "<s>x"
        assert ChatTemplate(source, "<s>", "</s>").render(TURNS) == "<s><s>x</s>"
        assert ChatTemplate(source, adds_bos=True).render(TURNS) == "x"

    def test_variables_that_templates_get(self) -> None:
        source = (
            "{{ enable_thinking }} {{ tools is defined }} {{ add_generation_prompt is defined }}"
        )
        template = ChatTemplate(source)
        assert template.render(TURNS) == "True False True"
        assert template.render(TURNS, tools=[TOOL], add_generation_prompt=False) == (
            "True True False"
        )
        assert template.render(TURNS, extra={"enable_thinking": False}) == "False False True"

    def test_reasoning_variables_have_several_names(self) -> None:
        template = ChatTemplate(
            "{{ preserve_thinking }}{{ clear_thinking }}{{ reasoning_strength }}"
        )
        extra = {"preserve_reasoning": False, "reasoning_effort": "low"}
        assert template.render(TURNS, extra=extra) == "FalseTruelow"
        extra = {"preserve_reasoning": True, "clear_thinking": "mine"}
        assert template.render(TURNS, extra=extra) == "Truemine"

    def test_the_date_is_the_given_clocks(self) -> None:
        template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 10, 1))
        assert template.render(TURNS) == "01 Oct 2026"
        template = ChatTemplate(
            "{{ datetime }}/{{ date_string }}", now=lambda: datetime(2026, 10, 1)
        )
        assert template.render(TURNS) == "Oct 01 2026/01 Oct 2026"
        assert template.render(TURNS, extra={"datetime": "then"}) == "then/01 Oct 2026"
        with pytest.raises(TemplateError, match="more than 256 characters"):
            ChatTemplate("{{ strftime_now('%d' * 200) }}").render(TURNS)

    def test_the_callers_messages_stay_as_they_are(self) -> None:
        turns = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
        ChatTemplate(CHATML).render(turns)
        assert turns == [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]

    def test_tools_stay_as_they_are_too(self) -> None:
        tools = [{**TOOL, "extra": [1]}]
        ChatTemplate("{% for t in tools %}{% set _ = t.extra.append(2) %}{% endfor %}").render(
            TURNS, tools=tools, extra={"mine": [1]}
        )
        assert tools == [{**TOOL, "extra": [1]}]

    def test_conditions_that_llama_cpp_takes_out(self) -> None:
        source = (
            '{%- if "<|channel|>analysis<|message|>" in message.content or '
            '"<|channel|>final<|message|>" in message.content %}'
            "{{ raise_exception('no') }}{%- endif %}ok"
        )
        assert ChatTemplate(source).render(TURNS) == "ok"

    def test_the_templates_own_refusal(self) -> None:
        with pytest.raises(TemplateError, match="only one turn"):
            ChatTemplate("{{ raise_exception('only one turn') }}").render(TURNS)

    def test_a_source_that_is_no_template(self) -> None:
        with pytest.raises(TemplateError, match="Expected an expression"):
            ChatTemplate("{% if %}")

    def test_threads_share_a_template(self) -> None:
        template = ChatTemplate(CHATML)

        def render(number: int) -> str:
            return template.render([{"role": "user", "content": str(number)}])

        with ThreadPoolExecutor(4) as pool:
            texts = list(pool.map(render, range(50)))
        assert texts == [
            f"<|im_start|>user\n{number}<|im_end|>\n<|im_start|>assistant\n" for number in range(50)
        ]


class TestCaps:
    """Expected values: llama.cpp's `/props` (chatml) and `jinja::caps_get` on the same sources."""

    def test_chatml(self) -> None:
        assert ChatTemplate(CHATML).caps == TemplateCaps(
            supports_parallel_tool_calls=False,
            supports_tool_calls=False,
            supports_tools=False,
        )

    def test_tools_calls_and_objects(self) -> None:
        source = (
            "{% if tools %}{{ tools | tojson }}{% endif %}"
            "{% for m in messages %}{{ m.role }}: {{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
            "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
            "{% endfor %}{% endfor %}"
        )
        assert ChatTemplate(source).caps == TemplateCaps(supports_object_arguments=True)

    def test_calls_as_text(self) -> None:
        source = (
            "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}"
            "{{ m.tool_calls[0].function.arguments + '' }}{% endif %}{% endfor %}"
        )
        caps = ChatTemplate(source).caps
        assert (caps.supports_tools, caps.supports_tool_calls) == (False, True)
        assert (caps.supports_object_arguments, caps.supports_parallel_tool_calls) == (False, False)

    def test_parts_alone(self) -> None:
        source = (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
        )
        caps = ChatTemplate(source).caps
        assert (caps.supports_string_content, caps.supports_typed_content) == (False, True)
        assert ChatTemplate(source).render([{"role": "user", "content": "a"}]) == "a"

    def test_text_or_parts(self) -> None:
        source = (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{{ p.text }},{% endfor %}{% endif %}{% endfor %}"
        )
        template = ChatTemplate(source)
        caps = template.caps
        assert (caps.supports_string_content, caps.supports_typed_content) == (True, True)
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert template.render([{"role": "user", "content": parts}]) == "a,b,"

    def test_no_system_role(self) -> None:
        source = (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        )
        template = ChatTemplate(source)
        assert not template.caps.supports_system_role
        assert template.render(TURNS) == "Be kind.\nHello there"

    def test_reasoning(self) -> None:
        source = (
            "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}"
            "{% if preserve_thinking %}{{ m.reasoning_content }}{% endif %}{% endfor %}"
        )
        caps = ChatTemplate(source).caps
        assert (caps.supports_preserve_reasoning, caps.supports_reasoning_effort) == (True, True)

    def test_a_template_that_refuses_everything_can_do_nothing(self) -> None:
        caps = ChatTemplate("{{ raise_exception('no') }}").caps
        assert not any(vars(caps).values())


@pytest.mark.parametrize(
    ("source", "shown"), [("a\r\nb\rc\n", "a\nb\nc"), ("a\n\n", "a\n"), ("a", "a")]
)
def test_the_source_is_shown_with_jinjas_line_ends(source: str, shown: str) -> None:
    template = ChatTemplate(source)
    assert template.source == shown
    assert template.render([]) == shown
