"""Token ids against a dict of the same texts."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.token_ids import TokenIds
from engine.text.token_texts import TokenTexts


def ids_of(tokens: list[bytes]) -> TokenIds:
    return TokenIds(TokenTexts(tokens))


@given(st.lists(st.binary(min_size=1, max_size=2), max_size=60), st.text(max_size=2))
def test_the_same_as_a_dict(tokens: list[bytes], other: str) -> None:
    texts = [token.decode("utf-8", "surrogateescape") for token in tokens]
    expected: dict[str, int] = {}
    for token_id, text in enumerate(texts):
        expected.setdefault(text, token_id)
    ids = ids_of(tokens)
    assert len(ids) == len(expected)
    assert list(ids) == list(expected)
    assert {text: ids[text] for text in texts} == expected
    assert ids.get(other) == expected.get(other)


def test_a_text_that_is_encoded_like_a_token_is_not_that_token() -> None:
    ids = ids_of(["é".encode()])
    assert ids["é"] == 0
    assert "\udcc3\udca9" not in ids  # the two bytes of é, each as a surrogate


def test_a_surrogate_that_no_byte_is_decoded_to_is_no_token() -> None:
    assert "\ud800" not in ids_of([b"a"])


def test_tokens_without_a_text_are_called_by_their_number() -> None:
    assert ids_of([b"a", b"", b"b"])["[EMPTY_1]"] == 1


def test_texts_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[TokenIds.__module__], "hash", len, raising=False)
    ids = ids_of([b"ab", b"cd", b"e", b"ab", b"fg"])
    assert (ids["ab"], ids["cd"], ids["e"], ids["fg"], len(ids)) == (0, 1, 2, 4, 4)
    assert "gh" not in ids
