from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidField, ModelFileError, UnsupportedModel
from engine.text.load import load_tokenizer
from engine.text.tokenizer import Tokenizer, TokenizerKind
from tests.unit.engine.text.vocabs import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    make_vocab,
    reference_spm,
    spm_rows,
)

LETTERS = "abc\u2581"
PIECES = st.lists(
    st.tuples(
        st.text(LETTERS, min_size=1, max_size=4),
        # Few scores, so that ties are common.
        st.sampled_from([-3.0, -2.0, -1.0]),
    ),
    unique_by=lambda piece: piece[0],
    min_size=1,
    max_size=24,
)


def tiny() -> Tokenizer:
    pieces = [("\u2581", -9.0), ("a", -9.0), ("b", -9.0), ("ab", -1.0), ("\u2581ab", -0.5)]
    return load_tokenizer(make_vocab("llama", spm_rows(pieces)))


class TestEncode:
    @settings(max_examples=150, deadline=None)
    @given(PIECES, st.lists(st.text("abc \u00e9\U0001f642", max_size=12), max_size=6))
    def test_merges_as_the_algorithm_says(
        self, pieces: list[tuple[str, float]], texts: list[str]
    ) -> None:
        rows = spm_rows(pieces)
        tokenizer = load_tokenizer(make_vocab("llama", rows, add_space_prefix=False))
        ids = {text: token_id for token_id, (text, _, _) in enumerate(rows)}
        scores = [score for _, score, _ in rows]
        for text in texts:
            got = tokenizer.encode(text, add_special=False, parse_special=False)
            assert got == reference_spm(text, ids, scores)

    def test_puts_bos_and_a_space_before(self) -> None:
        assert tiny().encode("ab", add_special=True, parse_special=True) == [1, 263]

    def test_a_space_follows_every_special_token(self) -> None:
        ids = tiny().encode("ab</s>ab", add_special=False, parse_special=True)
        assert ids == [263, 2, 263]

    def test_control_tokens_are_text_unless_parsed(self) -> None:
        ids = tiny().encode("</s>", add_special=False, parse_special=False)
        assert 2 not in ids
        assert tiny().decode(ids, render_special=True) == b" </s>"

    def test_merges_into_control_tokens_like_any_other(self) -> None:
        # llama.cpp looks up every text in the whole vocabulary.
        rows = [
            *spm_rows([("<", -5.0), ("x", -5.0), (">", -5.0), ("<x", -1.0)]),
            ("<x>", 0.0, CONTROL),
        ]
        tokenizer = load_tokenizer(make_vocab("llama", rows, add_space_prefix=False))
        assert tokenizer.encode("<x>", add_special=False, parse_special=False) == [len(rows) - 1]

    def test_user_defined_runs_of_spaces_are_found_as_stored(self) -> None:
        rows = [*spm_rows([("a", -1.0)]), ("  ", 0.0, USER_DEFINED), ("   ", 0.0, USER_DEFINED)]
        tokenizer = load_tokenizer(make_vocab("llama", rows, add_space_prefix=False))
        two, three, letter = len(rows) - 2, len(rows) - 1, len(rows) - 3
        ids = tokenizer.encode("a   a  a", add_special=False, parse_special=False)
        assert ids == [letter, three, letter, two, letter]
        assert tokenizer.decode(ids, render_special=False) == b"a   a  a"

    def test_empty_text_is_bos_alone(self) -> None:
        assert tiny().encode("", add_special=True, parse_special=True) == [1]
        assert tiny().encode("", add_special=False, parse_special=True) == []

    def test_nul_and_long_texts(self) -> None:
        ids = tiny().encode("a\0b" * 100_000, add_special=False, parse_special=False)
        assert tiny().decode(ids, render_special=False) == b" " + b"a\0b" * 100_000

    def test_says_what_a_vocabulary_without_bytes_cannot_spell(self) -> None:
        rows = [
            ("<unk>", 0.0, UNKNOWN),
            ("<s>", 0.0, CONTROL),
            ("</s>", 0.0, CONTROL),
            ("a", 0.0, NORMAL),
        ]
        tokenizer = load_tokenizer(make_vocab("llama", rows, add_space_prefix=False))
        assert tokenizer.encode("aa", add_special=False, parse_special=False) == [3, 3]
        with pytest.raises(InvalidField, match="no token for byte 0xC3"):
            tokenizer.encode("a\u00e9", add_special=False, parse_special=False)


class TestDefaults:
    def test_ids_and_flags_of_an_spm_file_that_says_nothing(self) -> None:
        tokenizer = tiny()
        assert tokenizer.kind is TokenizerKind.SPM
        assert (tokenizer.bos_token, tokenizer.eos_token) == (1, 2)
        assert (tokenizer.add_bos, tokenizer.add_eos) == (True, False)
        assert tokenizer.eog_tokens == {2}

    def test_flags_of_the_file_win(self) -> None:
        vocab = make_vocab("llama", spm_rows([("a", 0.0)]), add_bos=False, add_eos=True)
        tokenizer = load_tokenizer(vocab)
        assert (tokenizer.add_bos, tokenizer.add_eos) == (False, True)
        assert tokenizer.encode("", add_special=True, parse_special=False) == [2]

    def test_an_end_that_does_not_exist_is_refused(self) -> None:
        vocab = make_vocab("llama", [("a", 0.0, NORMAL), ("b", 0.0, NORMAL)], add_eos=True)
        with pytest.raises(UnsupportedModel, match="eos_token_id"):
            load_tokenizer(vocab)


class TestDamage:
    def test_two_tokens_of_one_text(self) -> None:
        with pytest.raises(ModelFileError, match="tokens 259 and 260 have the same text 'a'"):
            load_tokenizer(make_vocab("llama", spm_rows([("a", 0.0), ("a", 0.0)])))

    def test_empty_tokens_get_a_name_of_their_own(self) -> None:
        tokenizer = load_tokenizer(make_vocab("llama", spm_rows([("", 0.0), ("a", 0.0)])))
        assert tokenizer.piece(259) == b"[EMPTY_259]"

    def test_an_unknown_algorithm_is_named(self) -> None:
        with pytest.raises(
            UnsupportedModel, match="'rwkv' is not one of bert, gemma4, gpt2, llama"
        ):
            load_tokenizer(make_vocab("rwkv", [("a", 0.0, NORMAL)]))
