from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidField
from engine.sampling.breakers import Breakers

WORDS = st.lists(st.binary(max_size=5).map(lambda b: bytes(97 + x % 3 for x in b)), max_size=40)
TEXTS = st.lists(st.text("abc", max_size=4), max_size=4)


def _letters(text: str) -> list[int]:
    return [1000 + ord(letter) for letter in text]


def _tails(
    texts: list[str], words: list[bytes], tokenize: Callable[[str], list[int]] = _letters
) -> list[set[tuple[int, ...]]]:
    breakers = Breakers(texts, word=words.__getitem__, tokenize=tokenize)
    return [set(breakers.tails(token_id)) for token_id in range(len(words))]


@given(WORDS, TEXTS)
def test_tails_equal_the_definition(words: list[bytes], texts: list[str]) -> None:
    expected: list[set[tuple[int, ...]]] = [set() for _ in words]
    for tails, word in zip(expected, map(bytes.decode, words), strict=True):
        for text in filter(None, texts):
            if text in word:
                tails.add(())
                continue
            # Every place where the word, to its end, spells the beginning of the breaker.
            tails |= {
                tuple(_letters(text[len(word) - at :]))
                for at in range(len(word))
                if text.startswith(word[at:])
            }
    assert _tails(texts, words) == expected


def test_empty_breakers_are_skipped_and_long_ones_cut() -> None:
    breaker = "".join(chr(50 + i) for i in range(50))
    words = [breaker[:40].encode(), breaker[:39].encode(), b"other", b""]
    assert _tails(["", breaker], words) == [{()}, {tuple(_letters(breaker[39]))}, set(), set()]


def test_tails_are_cut_to_20_tokens() -> None:
    [tails] = _tails(["a" + "b" * 30], [b"za"])
    assert [len(tail) for tail in tails] == [20]


def test_a_rest_inside_a_character_spells_nothing() -> None:
    first_byte, whole = "é".encode()[:1], "é".encode()
    assert _tails(["é"], [first_byte, whole]) == [set(), {()}]


def test_a_rest_that_the_vocabulary_cannot_spell_is_no_tail() -> None:
    def tokenize(text: str) -> list[int]:
        raise InvalidField("text", f"no token for {text}")

    assert _tails(["ab"], [b"a", b"ab"], tokenize) == [set(), {()}]


def test_the_work_is_that_of_the_tokens_asked_for() -> None:
    """Breakers were once looked up in the whole vocabulary, in the step that admits a request."""
    seen, spelt = Counter[int](), Counter[str]()

    def word(token_id: int) -> bytes:
        seen[token_id] += 1
        return b"=" * 60

    def tokenize(text: str) -> list[int]:
        spelt[text] += 1
        return _letters(text)

    texts = [f"{'=' * 20}{i:03}" for i in range(20)]
    breakers = Breakers(texts, word=word, tokenize=tokenize)
    assert not seen
    assert not spelt
    for token_id in (7, 9, 7, 9, 7):
        breakers.tails(token_id)
    assert seen == {7: 1, 9: 1}
    # One rest per byte of the breakers at most, however many words begin them.
    assert set(spelt.values()) == {1}
    assert len(spelt) <= sum(map(len, texts))
