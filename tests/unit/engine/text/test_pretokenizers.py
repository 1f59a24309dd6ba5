from __future__ import annotations

import re

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Sequence, Split

from engine.errors import UnsupportedModel
from engine.text.pretokenizers import find_pre_tokenizer
from tests.unit.engine.text.recorded_words import TEXTS, WORD_LENGTHS

NAMES = [name for names, _ in WORD_LENGTHS for name in names]
EXPECTED = {name: lengths for names, lengths in WORD_LENGTHS for name in names}


def split_words(name: str, text: str) -> list[str]:
    steps: list[PreTokenizer] = [
        Split(Regex(pattern), "isolated") for pattern in find_pre_tokenizer(name).patterns
    ]
    return [word for word, _ in Sequence(steps).pre_tokenize_str(text)]


def parse_lengths(lengths: str) -> list[int]:
    digits = re.findall(r"\{\d+\}|.", lengths)
    return [int(d[1:-1]) if d.startswith("{") else int(d, 36) for d in digits]


@pytest.mark.parametrize("name", NAMES)
def test_words_are_llama_cpps(name: str) -> None:
    for text, lengths in zip(TEXTS, EXPECTED[name], strict=True):
        assert [len(word) for word in split_words(name, text)] == parse_lengths(lengths)


@pytest.mark.parametrize("name", [name for name in NAMES if find_pre_tokenizer(name).breaks])
def test_a_text_may_be_cut_where_the_name_says(name: str) -> None:
    breaks = find_pre_tokenizer(name).breaks or ""
    text = "It is 1234 \u00e9t\u00e9\nOne two  three\n\n four five\nsix 7 and \u4e2d on"
    cuts = [match.start() for match in re.finditer(breaks, text)]
    assert cuts
    for cut in cuts:
        assert split_words(name, text[:cut]) + split_words(name, text[cut:]) == split_words(
            name, text
        )


@pytest.mark.parametrize("name", ["superbpe", "afmoe", "tiny_aya", "deepseek-llm"])
@pytest.mark.timeout(60)
def test_long_runs_take_linear_time(name: str) -> None:
    # A look-ahead at every place would be 10 ** 10 steps, hours.
    for text in ("1" * 100_000, "a" * 100_000, " " * 100_000 + "\u4e2d"):
        assert "".join(split_words(name, text)) == text


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModel, match=r"'x' is unknown.*--override-pre.*llama-bpe.*qwen2"):
        find_pre_tokenizer("x")
