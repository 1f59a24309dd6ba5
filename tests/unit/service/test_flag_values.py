from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.requests import DEFAULT_SAMPLERS, Sampler
from service.flag_values import (
    LOGIT_BIAS,
    SAMPLER_LETTERS,
    SAMPLERS,
    SEED,
    SWITCH,
    BadValue,
    comma_list,
    integer,
    number,
    unescape,
)


@pytest.mark.parametrize("word", ["on", "enabled", "true", "1", "ON"])
def test_words_for_on(word: str) -> None:
    assert SWITCH.parse(word) is True


@pytest.mark.parametrize("word", ["off", "disabled", "false", "0"])
def test_words_for_off(word: str) -> None:
    assert SWITCH.parse(word) is False


@given(st.integers(-(10**6), 10**6), st.integers(-1000, 0), st.integers(1, 1000))
def test_integer_accepts_exactly_its_range(value: int, low: int, high: int) -> None:
    kind = integer(low, high)
    if low <= value <= high:
        assert kind.parse(str(value)) == value
    else:
        with pytest.raises(BadValue, match=f"between {low} and {high}"):
            kind.parse(str(value))


@pytest.mark.parametrize("text", ["1.0", "1e3", "0x10", "", " 1", "\u0663"])
def test_integer_is_plain_decimal(text: str) -> None:
    with pytest.raises(BadValue):
        integer(0).parse(text)


def test_number_clamps_only_where_asked() -> None:
    assert number(0, 1, clamp=True).parse("7") == 1
    with pytest.raises(BadValue, match="between 0 and 1"):
        number(0, 1).parse("7")


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400", "one"])
def test_number_is_finite(text: str) -> None:
    with pytest.raises(BadValue):
        number().parse(text)


def test_comma_list_quotes_and_drops_empty_items() -> None:
    assert comma_list().parse('a, b,,"c,d"') == ("a", "b", "c,d")
    assert comma_list().parse("") == ()


def test_seed_minus_one_and_its_unsigned_twin_are_random() -> None:
    assert SEED.parse("-1") is None
    assert SEED.parse("4294967295") is None
    assert SEED.parse("4294967294") == 4294967294


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("15043+1", (15043, 1.0)),
        ("15043-0.5", (15043, -0.5)),
        ("7-inf", (7, -math.inf)),
        ("7 + 2", (7, 2.0)),
    ],
)
def test_logit_bias(text: str, value: tuple[int, float]) -> None:
    assert LOGIT_BIAS.parse(text) == value


@pytest.mark.parametrize("text", ["15043", "+1", "1*2", "1+nan", "1+x", "99999999999+1"])
def test_logit_bias_refuses(text: str) -> None:
    with pytest.raises(BadValue):
        LOGIT_BIAS.parse(text)


def test_samplers_by_all_spellings() -> None:
    text = "penalties;dry;top-n-sigma;topk;typ;nucleus;min_p;XTC;temp"
    assert SAMPLERS.parse(text) == DEFAULT_SAMPLERS
    assert SAMPLERS.parse("") == ()


def test_default_letters_are_the_default_chain() -> None:
    assert SAMPLER_LETTERS.parse("edskypmxt") == DEFAULT_SAMPLERS
    assert SAMPLER_LETTERS.parse("ia") == (Sampler.INFILL, Sampler.ADAPTIVE_P)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (r"a\nb\tc", "a\nb\tc"),
        (r"\\n", "\\n"),
        (r"\x41\xc3\xa9", "Aé"),
        (r"\q", "\\q"),
        (r"\xZZ", "\\xZZ"),
        ("\\", "\\"),
        ("ø", "ø"),
    ],
)
def test_unescape(text: str, plain: str) -> None:
    assert unescape(text) == plain


def test_unescape_refuses_what_is_not_utf8() -> None:
    with pytest.raises(BadValue, match="UTF-8"):
        unescape(r"\xff")
