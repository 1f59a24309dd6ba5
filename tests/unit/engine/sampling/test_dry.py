from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.dry import Dry, suffix_runs
from tests.unit.engine.sampling.support import candidates

TOKENS = st.lists(st.integers(0, 3), max_size=40)
BREAKERS = st.dictionaries(
    st.integers(0, 3),
    st.sets(st.lists(st.integers(0, 3), max_size=2).map(tuple), min_size=1, max_size=2),
    max_size=2,
)
F = np.float32
Breakers = dict[int, set[tuple[int, ...]]]


def _no_breakers(token_id: int) -> set[tuple[int, ...]]:
    return set()


def _run_at(tokens: list[int], end: int) -> int:
    """How many tokens up to `end` equal the end of the sequence."""
    length = 0
    while length <= end and tokens[end - length] == tokens[-1 - length]:
        length += 1
    return length


def _limit(tokens: list[int], breakers: Breakers) -> int:
    """The tokens behind the nearest breaker."""
    for back in range(len(tokens)):
        at = len(tokens) - 1 - back
        spelt = [
            len(tail)
            for tail in breakers.get(tokens[at], ())
            if tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail
        ]
        if spelt:
            return back - max(spelt)
    return len(tokens)


def _expected(
    tokens: list[int], multiplier: float, base: float, allowed: int, breakers: Breakers
) -> list[float]:
    limit = _limit(tokens, breakers)
    longest: dict[int, int] = {}
    if len(tokens) > allowed and limit >= allowed:
        for end in range(len(tokens) - 1):
            run = min(_run_at(tokens, end), limit)
            if run >= allowed:
                longest[tokens[end + 1]] = max(run, longest.get(tokens[end + 1], 0))
    return [
        -multiplier * base ** (longest[i] - allowed)
        if i in longest and () not in breakers.get(i, ())
        else 0.0
        for i in range(4)
    ]


@given(TOKENS.filter(bool))
def test_suffix_runs(tokens: list[int]) -> None:
    assert suffix_runs(tokens)[:-1] == [_run_at(tokens, end) for end in range(len(tokens) - 1)]
    assert suffix_runs(tokens)[-1] == 0


@given(
    prompt=TOKENS,
    generated=TOKENS,
    last_n=st.integers(1, 25),
    allowed=st.integers(0, 4),
    breakers=BREAKERS,
)
def test_penalties_equal_the_definition(
    prompt: list[int], generated: list[int], last_n: int, allowed: int, breakers: Breakers
) -> None:
    dry = Dry(
        multiplier=0.5,
        base=1.5,
        allowed_length=allowed,
        last_n=last_n,
        breakers=lambda token_id: breakers.get(token_id, set()),
        prompt=prompt,
    )
    for token_id in generated:
        dry.accept(token_id)
    window = (prompt + generated)[-last_n:]
    result = dry.apply(candidates([0.0] * 4))
    assert result.logits.tolist() == pytest.approx(_expected(window, 0.5, 1.5, allowed, breakers))


def test_exponents_stop_before_float_overflows() -> None:
    dry = Dry(
        multiplier=1.0,
        base=1.75,
        allowed_length=0,
        last_n=400,
        breakers=_no_breakers,
        prompt=[1] * 300,
    )
    # llama.cpp clamps to int(88.72 / ln 1.75) = 158; the run is 299.
    assert dry.apply(candidates([0.0, 0.0])).logits.tolist() == [0.0, -float(F(1.75**158))]


def test_a_base_of_1_is_a_constant_penalty() -> None:
    dry = Dry(
        multiplier=2.0,
        base=1.0,
        allowed_length=1,
        last_n=64,
        breakers=_no_breakers,
        prompt=[1] * 60,
    )
    assert dry.apply(candidates([0.0, 0.0])).logits.tolist() == [0.0, -2.0]


def test_a_window_too_short_leaves_the_set_sorted() -> None:
    dry = Dry(
        multiplier=1.0, base=2.0, allowed_length=3, last_n=3, breakers=_no_breakers, prompt=[1] * 9
    )
    assert dry.apply(candidates([1.0, 0.0], is_sorted=True)).is_sorted
