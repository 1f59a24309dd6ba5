from __future__ import annotations

from typing import Any

import pytest

from engine.errors import InvalidField, TokenNotInVocab
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer
from tests.unit.engine.text.vocabs import CONTROL, NORMAL, USER_DEFINED, make_vocab, spm_rows


@pytest.fixture
def tokenizer() -> Tokenizer:
    rows = [*spm_rows([("a", -1.0), ("\u2581", -2.0)]), ("<shown>", 0.0, USER_DEFINED)]
    return load_tokenizer(make_vocab("llama", rows))


class TestPiece:
    def test_control_tokens_show_only_on_request(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.piece(1) == b""
        assert tokenizer.piece(1, render_special=True) == b"<s>"
        assert tokenizer.piece(261) == b"<shown>"

    def test_decode_joins_pieces_and_keeps_the_first_space(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a\n", add_special=True, parse_special=True)
        assert tokenizer.decode(ids, render_special=True) == b"<s> a\n"
        assert tokenizer.decode(ids, render_special=False) == b" a\n"

    @pytest.mark.parametrize("token_id", [-1, 262, 2**40])
    def test_an_id_outside_is_named(self, tokenizer: Tokenizer, token_id: int) -> None:
        with pytest.raises(TokenNotInVocab, match=f"{token_id} is not in the vocabulary of 262"):
            tokenizer.piece(token_id, render_special=True)
        with pytest.raises(TokenNotInVocab):
            tokenizer.decode([1, token_id], render_special=True)


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidField, match=r"character 2 is the lone surrogate U\+D800"):
        tokenizer.encode("ab\ud800", add_special=True, parse_special=True)


def test_tokens_are_found_by_their_spelling(tokenizer: Tokenizer) -> None:
    assert tokenizer.find("<s>") == 1
    assert tokenizer.find("nothing") is None


class TestWordPiece:
    def bert(self, **others: Any) -> Tokenizer:
        words = [
            "[PAD]",
            "\u2581un",
            "able",
            "\u2581caf\u00e9",
            "\u2581cafe",
            "\u2581!",
            "\u2581\u4e2d",
        ]
        rows = [(word, 0.0, NORMAL) for word in words]
        special = [("[UNK]", 0.0, CONTROL), ("[CLS]", 0.0, CONTROL), ("[SEP]", 0.0, CONTROL)]
        ids = {"unk_token": 7, "bos_token": 8, "sep_token": 9}
        return load_tokenizer(make_vocab("bert", [*rows, *special], **ids, **others))

    def test_takes_the_longest_piece_and_surrounds_the_text(self) -> None:
        ids = self.bert().encode("Unable!", add_special=True, parse_special=False)
        assert ids == [8, 1, 2, 5, 9]

    def test_accents_and_case_go_unless_the_file_keeps_them(self) -> None:
        plain, exact = self.bert(), self.bert(lowercase=False)
        assert plain.encode("CAF\u00c9", add_special=False, parse_special=False) == [4]
        assert exact.encode("caf\u00e9", add_special=False, parse_special=False) == [3]

    def test_a_word_that_cannot_be_spelt_is_unknown_as_a_whole(self) -> None:
        ids = self.bert().encode(
            "unablx \u4e2d\u4e2d\u200b", add_special=False, parse_special=False
        )
        assert ids == [7, 6, 6]
