from __future__ import annotations

import pytest

from engine.errors import EngineError, NotSupported, TemplateError
from engine.text.builtin_formats import BUILTIN_FORMATS
from engine.text.builtin_templates import CHATML
from engine.text.chat_template import ChatTemplate
from engine.text.turn_template import TurnTemplate
from service.template import file_template, open_template, try_template

USER = {"role": "user", "content": "Hi"}


def test_a_files_template_is_its_default_one() -> None:
    assert file_template("x", {"tool_use": "t"}, "tekken", 40) == "x"


@pytest.mark.parametrize("default", [None, "", "chatml"])
def test_a_file_with_only_a_template_for_tools_uses_that(default: str | None) -> None:
    assert file_template(default, {"tool_use": "t", "rag": "r"}, None, 2) == "t"
    assert file_template(default, {"rag": "r"}, None, 2) == ""


def test_mistral_small_is_known_without_a_template() -> None:
    assert file_template(None, {}, "tekken", 40) == "mistral-v7-tekken"
    assert file_template(None, {}, "tekken", 32) == ""
    assert file_template(None, {}, "llama-bpe", 40) == ""


@pytest.mark.parametrize("use_jinja", [True, False])
@pytest.mark.parametrize("source", ["", "chatml", CHATML])
def test_chatml_is_what_a_model_without_a_template_has(source: str, use_jinja: bool) -> None:
    template = open_template(source, use_jinja=use_jinja)
    assert template.source == CHATML
    assert isinstance(template, ChatTemplate if use_jinja else TurnTemplate)
    assert template.render([USER]) == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("use_jinja", [True, False])
def test_a_name_is_a_format_with_jinja_too(use_jinja: bool) -> None:
    template = open_template("llama2", "<s>", "</s>", adds_bos=True, use_jinja=use_jinja)
    assert template.render([USER]) == "[INST] Hi [/INST]"
    # A format's own BOS stays, whether tokenising adds one or not.
    template = open_template("gigachat", "<s>", adds_bos=True, use_jinja=use_jinja)
    assert template.render([USER]).startswith("<s>user<|role_sep|>Hi")


def test_source_is_run_with_jinja_and_recognised_without() -> None:
    source = "{{ bos_token }}[INST] {{ messages[0].content }}{{ eos_token }}"
    ends = ("<s>", "</s>")
    assert open_template(source, *ends, adds_eos=True).render([USER]) == "<s>[INST] Hi"
    assert open_template(source, *ends, use_jinja=False).render([USER]) == "[INST] Hi [/INST]"


def test_text_is_a_template_with_jinja_and_refused_without() -> None:
    text = "This is not a chat template, it is"
    assert open_template(text).render([USER]) == text
    try_template(text, use_jinja=True)
    with pytest.raises(NotSupported, match="without --jinja"):
        try_template(text, use_jinja=False)


@pytest.mark.parametrize("name", BUILTIN_FORMATS)
def test_every_name_may_be_asked_for(name: str) -> None:
    try_template(name, use_jinja=True)
    try_template(name, use_jinja=False)


@pytest.mark.parametrize("use_jinja", [True, False])
def test_what_is_no_template_is_refused(use_jinja: bool) -> None:
    with pytest.raises(TemplateError):
        try_template("<|im_start|>{% endfor %}", use_jinja=use_jinja)


def test_a_template_must_render_the_simplest_conversation() -> None:
    with pytest.raises(EngineError, match="only for two"):
        try_template("{{ raise_exception('only for two') }}", use_jinja=True)
