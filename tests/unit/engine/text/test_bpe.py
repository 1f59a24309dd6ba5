from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidField, UnsupportedModel
from engine.text.load import load_tokenizer
from engine.text.pieces import byte_characters
from engine.text.tokenizer import Tokenizer, TokenizerKind
from tests.unit.engine.text.vocabs import (
    BYTE,
    BYTE_TOKENS,
    CONTROL,
    NORMAL,
    USER_DEFINED,
    make_vocab,
    reference_bpe,
)

ALPHABET = byte_characters()
PAIRS = st.lists(
    st.tuples(*[st.text("abcd", min_size=1, max_size=3)] * 2), min_size=1, max_size=16, unique=True
)


def rows_of(texts: list[str]) -> list[tuple[str, float, int]]:
    return [(text, 0.0, NORMAL) for text in texts]


def tokenizer_of(merges: list[str], pre: str = "gpt-2", **others: Any) -> Tokenizer:
    merged = dict.fromkeys(merge.replace(" ", "", 1) for merge in merges)
    rows = [*rows_of([*ALPHABET, *merged]), ("<|end|>", 0.0, CONTROL), ("<|x|>", 0.0, USER_DEFINED)]
    return load_tokenizer(make_vocab("gpt2", rows, merges=merges, pre=pre, **others))


class TestEncode:
    @settings(max_examples=150, deadline=None)
    @given(PAIRS, st.sets(st.integers(0, 47)), st.text("abcd", min_size=1, max_size=14))
    def test_merges_as_the_algorithm_says(
        self, pairs: list[tuple[str, str]], missing: set[int], word: str
    ) -> None:
        # Parts and results of merges that are no tokens included: real files have some.
        merges = [f"{left} {right}" for left, right in pairs]
        texts = dict.fromkeys(text for left, right in pairs for text in (left, right, left + right))
        kept = [text for number, text in enumerate(texts) if number not in missing]
        vocab = [*ALPHABET, *(text for text in kept if text not in ALPHABET)]
        tokenizer = load_tokenizer(make_vocab("gpt2", rows_of(vocab), merges=merges, pre="gpt-2"))
        ids = {text: token_id for token_id, text in enumerate(vocab)}
        got = tokenizer.encode(word, add_special=False, parse_special=False)
        assert got == reference_bpe(word, ids, merges)

    def test_bytes_are_written_as_gpt2_writes_them(self) -> None:
        tokenizer = tokenizer_of(["\u0120 a", "\u00c3 \u00a9"])
        ids = tokenizer.encode(" a\u00e9\n", add_special=False, parse_special=False)
        assert ids == [256, 257, ALPHABET.index("\u010a")]
        assert tokenizer.decode(ids, render_special=False) == " a\u00e9\n".encode()

    def test_a_byte_without_a_token_vanishes(self) -> None:
        vocab = make_vocab("gpt2", rows_of(["a", "b", "ab"]), merges=["a b"], pre="gpt-2")
        tokenizer = load_tokenizer(vocab)
        # It still keeps its neighbours apart.
        assert tokenizer.encode("azb", add_special=False, parse_special=False) == [0, 1]

    def test_tokens_and_merges_that_are_no_utf8_change_nothing(self) -> None:
        # As damaged files have them; the package takes no such text.
        rows = rows_of([*ALPHABET, "\udcff\udce6", "ab", "a\udcff"])
        merges = ["a \udcff", "\udcff \udce6", "a b"]
        tokenizer = load_tokenizer(make_vocab("gpt2", rows, merges=merges, pre="gpt-2"))
        assert tokenizer.encode("ab", add_special=False, parse_special=False) == [257]

    @pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", [258]), ("gpt-2", [97, 257])])
    def test_a_word_that_is_a_token_is_not_merged_where_the_name_says_so(
        self, pre: str, expected: list[int]
    ) -> None:
        rows = rows_of([*ALPHABET, "ab", "bc", "abc"])
        vocab = make_vocab("gpt2", rows, merges=["b c", "a b"], pre=pre, add_bos=False)
        ids = load_tokenizer(vocab).encode("abc", add_special=False, parse_special=False)
        assert ids == [ALPHABET.index("a") if i == 97 else i for i in expected]

    def test_long_texts_are_cut_without_a_trace(self) -> None:
        tokenizer = tokenizer_of(["\u0120 a", "\u0120a b", "\u0120 b"])
        text = "ab ab b\n\n  a" * 30_000
        whole = tokenizer.encode(text, add_special=False, parse_special=False)
        line = tokenizer.encode("ab ab b\n\n  a", add_special=False, parse_special=False)
        assert whole == line * 30_000

    def test_a_word_that_the_package_panics_on_is_refused(self) -> None:
        tokenizer = tokenizer_of(["a b"], pre="exaone-moe")
        with pytest.raises(InvalidField, match="10500000 characters without a break"):
            tokenizer.encode("A" * 10_500_000, add_special=False, parse_special=False)

    def test_threads_share_a_tokenizer(self) -> None:
        tokenizer = tokenizer_of(["a b", "ab c"])
        texts = [f"abc ab {number} " * 50 for number in range(40)]

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=False)

        alone = [encode(text) for text in texts]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(encode, texts)) == alone


class TestRawBpe:
    def gemma4(self, **others: Any) -> Tokenizer:
        special = [("<bos>", 0.0, CONTROL), ("<eos>", 0.0, CONTROL)]
        bytes_ = [(text, 0.0, BYTE) for text in BYTE_TOKENS]
        words = rows_of(["\u2581", "a", "\u2581a", "\n", "\n\n"])
        vocab = make_vocab(
            "gemma4", [*special, *bytes_, *words], merges=["\u2581 a"], bos_token=0, **others
        )
        return load_tokenizer(vocab)

    def test_spaces_are_escaped_and_unknown_characters_spelt_in_bytes(self) -> None:
        tokenizer = self.gemma4()
        ids = tokenizer.encode("a a\u00e9", add_special=False, parse_special=False)
        assert ids == [259, 260, 2 + 0xC3, 2 + 0xA9]
        assert tokenizer.decode(ids, render_special=False) == "a a\u00e9".encode()

    def test_a_run_of_newlines_that_is_a_token_is_not_merged(self) -> None:
        ids = self.gemma4().encode("a\n\na\n\n\n", add_special=False, parse_special=False)
        assert ids == [259, 262, 259, 261, 261, 261]

    def test_bos_is_added_whatever_the_file_says(self) -> None:
        tokenizer = self.gemma4(add_bos=False)
        assert tokenizer.encode("a", add_special=True, parse_special=False) == [0, 259]


class TestDefaults:
    def test_no_bos_unless_the_name_or_the_file_says_so(self) -> None:
        assert not tokenizer_of(["a b"]).add_bos
        assert tokenizer_of(["a b"], pre="llama-bpe").add_bos
        assert tokenizer_of(["a b"], bos_token=0, add_bos=True).encode(
            "", add_special=True, parse_special=False
        ) == [0]
        assert tokenizer_of(["a b"]).kind is TokenizerKind.BPE

    def test_token_11_is_the_default_end_but_not_everywhere(self) -> None:
        assert tokenizer_of(["a b"]).bos_token == 11
        assert tokenizer_of(["a b"], pre="glm4").bos_token is None

    @pytest.mark.parametrize(
        ("pre", "cause"), [("no-such", "'no-such' is unknown"), (None, "missing")]
    )
    def test_an_unknown_pre_tokenizer_names_the_flag(self, pre: str | None, cause: str) -> None:
        vocab = make_vocab("gpt2", rows_of(["a", "b", "ab"]), merges=["a b"], pre=pre)
        with pytest.raises(UnsupportedModel, match=f"{cause}.*--override-pre"):
            load_tokenizer(vocab)
        assert load_tokenizer(vocab, pre_override="gpt-2").vocab_size == 3

    def test_bpe_without_merges_is_refused(self) -> None:
        with pytest.raises(UnsupportedModel, match="merges"):
            load_tokenizer(make_vocab("gpt2", rows_of(["a"]), pre="gpt-2"))
