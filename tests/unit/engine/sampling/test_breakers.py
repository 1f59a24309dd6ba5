from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.breakers import WordIndex, find_breakers

WORDS = st.lists(st.binary(max_size=5).map(lambda b: bytes(97 + x % 3 for x in b)), max_size=40)
PARTS = st.text("abc", min_size=1, max_size=4)


def _letters(text: str) -> list[int]:
    return [1000 + ord(letter) for letter in text]


@given(WORDS, PARTS)
def test_index_finds_what_a_loop_over_the_words_finds(words: list[bytes], part: str) -> None:
    index, wanted = WordIndex(words), part.encode()
    assert list(index.containing(wanted)) == [i for i, w in enumerate(words) if wanted in w]
    assert list(index.ending_with(wanted)) == [i for i, w in enumerate(words) if w.endswith(wanted)]


@given(WORDS, PARTS)
def test_breakers_equal_the_definition(words: list[bytes], part: str) -> None:
    expected: dict[int, set[tuple[int, ...]]] = {}
    for i, word in enumerate(words):
        text = word.decode()
        if part in text:
            expected.setdefault(i, set()).add(())
            continue
        # Every place where the word, to its end, spells the beginning of the breaker.
        for at in range(len(text)):
            if part.startswith(text[at:]):
                expected.setdefault(i, set()).add(tuple(_letters(part[len(text) - at :])))
    assert find_breakers([part], words=WordIndex(words), tokenize=_letters) == expected


def test_empty_breakers_are_skipped_and_long_ones_cut() -> None:
    breaker = "".join(chr(50 + i) for i in range(50))
    words = WordIndex([breaker[:40].encode(), breaker[:39].encode(), b"other"])
    found = find_breakers(["", breaker], words=words, tokenize=_letters)
    assert found == {0: {()}, 1: {tuple(_letters(breaker[39]))}}


def test_tails_are_cut_to_20_tokens() -> None:
    found = find_breakers(["a" + "b" * 30], words=WordIndex([b"za"]), tokenize=_letters)
    assert [len(tail) for tail in found[0]] == [20]


def test_a_rest_inside_a_character_spells_nothing() -> None:
    first_byte, whole = "é".encode()[:1], "é".encode()
    found = find_breakers(["é"], words=WordIndex([first_byte, whole]), tokenize=_letters)
    assert found == {1: {()}}
