from __future__ import annotations

import math

import pytest

from engine.sampling.mt19937 import Mt19937
from engine.sampling.xtc import Xtc
from tests.unit.engine.sampling.support import candidates, from_probs, ids

SEED = 42  # Its first float is 0.3745.


def _apply(
    probs: list[float], *, probability: float = 1.0, threshold: float = 0.1, min_keep: int = 0
) -> list[int]:
    xtc = Xtc(probability=probability, threshold=threshold, min_keep=min_keep, seed=SEED)
    return ids(xtc.apply(from_probs(probs)))


def test_drops_all_likely_tokens_but_the_least_likely_of_them() -> None:
    assert _apply([0.05, 0.3, 0.15, 0.45, 0.05]) == [2, 0, 4]


@pytest.mark.parametrize(("probability", "is_applied"), [(0.37, False), (0.38, True)])
def test_happens_with_the_given_probability(probability: float, is_applied: bool) -> None:
    kept = _apply([0.6, 0.4], probability=probability)
    assert kept == ([1] if is_applied else [0, 1])


def test_one_likely_token_is_never_dropped() -> None:
    assert _apply([0.05, 0.9, 0.05]) == [1, 0, 2]


def test_every_token_likely_leaves_the_last() -> None:
    assert _apply([0.5, 0.3, 0.2]) == [2]


def test_min_keep_prevents_it() -> None:
    assert _apply([0.5, 0.3, 0.2], min_keep=2) == [0, 1, 2]


def test_draws_one_float_unless_a_single_candidate_is_left() -> None:
    xtc = Xtc(probability=0.5, threshold=0.1, min_keep=0, seed=SEED)
    floats = Mt19937(SEED)
    for _ in range(20):
        xtc.apply(candidates([1.0]))
        expected = [1] if floats.next_float() <= 0.5 else [0, 1]
        assert ids(xtc.apply(candidates([math.log(0.6), math.log(0.4)]))) == expected
