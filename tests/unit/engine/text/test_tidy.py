"""The echo of a prompt: cases worked out from llama.cpp's three passes."""

from __future__ import annotations

import pytest

from engine.text.load import load_tokenizer
from engine.text.tidy import keeps_spaces, tidied
from tests.unit.engine.text.vocabs import make_vocab, spm_rows


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"Hello , world !", b"Hello, world!"),
        (b"a  . b", b"a . b"),
        (b" . a", b". a"),
        (b"a ' b", b"a'b"),
        (b"a ' ' b", b"a'' b"),
        (b"it 's I 'm we 're they 've", b"it's I'm we're they've"),
        (b"I 'd don 't we 'll x 'r y 'v", b"I 'd don 't we 'll x 'r y 'v"),
        (b"it '", b"it '"),
        (b"", b""),
    ],
)
def test_spaces(text: bytes, shown: bytes) -> None:
    assert tidied(text) == shown


def test_which_vocabularies_keep_their_spaces() -> None:
    assert keeps_spaces("smollm")
    assert not keeps_spaces("llama-bpe")
    assert not keeps_spaces(None)


def test_a_sentencepiece_prompt_loses_the_space_that_encoding_added() -> None:
    tokenizer = load_tokenizer(
        make_vocab("llama", spm_rows([("a", -1.0), ("\u2581", -2.0), ("\u2581a", -1.5)]))
    )
    plain = tokenizer.encode("a a", add_special=False, parse_special=False)
    assert tokenizer.decode(plain, render_special=True) == b" a a"
    assert tokenizer.prompt_text(plain) == b"a a"
    with_bos = tokenizer.encode("a a", add_special=True, parse_special=False)
    assert tokenizer.prompt_text(with_bos) == b"<s> a a"
    assert tokenizer.prompt_text([]) == b""
