"""Which chat template a server uses, and whether it is run or only recognised.

Source: llama.cpp `common_chat_templates_init`, `common_chat_verify_template` and, for a file
without a template, `llama_model_chat_template`.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.gguf.vocab import Vocab
from engine.text.builtin_formats import BUILTIN_FORMATS
from engine.text.builtin_templates import CHATML
from engine.text.chat_template import ChatTemplate
from engine.text.turn_template import TurnTemplate

_TRIAL = ({"role": "user", "content": "test"},)


def file_template(
    template: str | None, named: Mapping[str, str], pre: str | None, num_layers: int
) -> str:
    """Returns the template of a model file; "" if it has none.

    Args:
        template: the file's default template.
        named: its further ones.
        pre: its pre-tokenizer's name.
        num_layers: of the model.
    """
    if template is None and pre == "tekken" and num_layers == 40:
        # Mistral Small 3.1, whose files lack their template.
        return "mistral-v7-tekken"
    if template in (None, "", "chatml"):
        return named.get("tool_use", "")
    return template or ""


def try_file_template(given: str | None, vocab: Vocab, num_layers: int, *, use_jinja: bool) -> None:
    """Checks that the template that a model would be served with is one.

    Raises:
        TemplateError: It is not.
    """
    source = given or file_template(
        vocab.chat_template, vocab.chat_templates, vocab.pre, num_layers
    )
    open_template(source, use_jinja=use_jinja)


def open_template(
    source: str,
    bos_text: str = "",
    eos_text: str = "",
    *,
    adds_bos: bool = False,
    adds_eos: bool = False,
    use_jinja: bool = True,
) -> ChatTemplate | TurnTemplate:
    """Makes a template of Jinja source, or of a built-in format's name; "" is ChatML.

    Without Jinja a source is not run but recognised. A name is never source, though with Jinja
    llama.cpp takes it for one, whose prompt is the name.

    Args:
        source: the template.
        bos_text: text of BOS.
        eos_text: text of EOS.
        adds_bos: tokenising adds BOS to a prompt.
        adds_eos: tokenising adds EOS to a prompt.
        use_jinja: run templates.

    Raises:
        TemplateError: The source is no template, or too long.
    """
    if source in ("", "chatml"):
        source = CHATML
    if not use_jinja or source in BUILTIN_FORMATS:
        return TurnTemplate(source)
    return ChatTemplate(source, bos_text, eos_text, adds_bos=adds_bos, adds_eos=adds_eos)


def try_template(source: str, *, use_jinja: bool) -> None:
    """Checks that a template writes the simplest conversation.

    Raises:
        EngineError: It does not; the message says why.
    """
    open_template(source, use_jinja=use_jinja).render(_TRIAL)
