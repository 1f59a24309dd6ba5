from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.sampling.candidates import gather
from engine.sampling.truncation import MinP, TopK, TopNSigma, TopP, TypicalP, unordered_sort
from tests.unit.engine.sampling.support import ArrayRow, candidates, ids

LOGITS = st.lists(
    st.integers(-400, 400).map(lambda n: n / 50), min_size=1, max_size=80, unique=True
)
F = np.float32


def _probs(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


def _falling(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: -logits[i])


@given(LOGITS, st.integers(1, 100))
def test_top_k(logits: list[float], k: int) -> None:
    kept = TopK(k).apply(candidates(logits))
    assert ids(kept) == _falling(logits)[:k]
    assert kept.is_sorted


def test_top_k_of_a_sorted_set_cuts_it() -> None:
    assert ids(TopK(2).apply(candidates([3, 2, 1], is_sorted=True))) == [0, 1]


@given(LOGITS, st.floats(0, 0.999), st.integers(0, 6))
def test_top_p(logits: list[float], p: float, min_keep: int) -> None:
    probs = _probs(logits)
    mass = 0.0
    expected: list[int] = []
    for i in _falling(logits):
        # Rounding decides where the mass meets p; that is the numerics test's business.
        assume(abs(mass + probs[i] - p) > 1e-5)
        mass += probs[i]
        expected.append(i)
        if mass >= p and len(expected) >= min_keep:
            break
    assert ids(TopP(F(p), min_keep).apply(candidates(logits))) == expected


@pytest.mark.parametrize("size", [100, 2000, 20_000])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_top_p_grows_its_guess_until_the_mass_is_reached(size: int, p: float) -> None:
    logits = np.random.default_rng(size).normal(size=size).astype(np.float32).tolist()
    order, probs = _falling(logits), _probs(logits)
    kept = TopP(F(p), 0).apply(candidates(logits))
    assert ids(kept) == order[: len(kept)]
    masses = [sum(probs[i] for i in order[:n]) for n in (len(kept) - 1, len(kept))]
    assert masses[0] < p + 1e-3
    assert masses[1] > p - 1e-3


def test_top_p_keeps_at_least_min_keep_of_many() -> None:
    logits = np.random.default_rng(0).normal(size=3000).astype(np.float32).tolist()
    assert ids(TopP(F(0.0), 700).apply(candidates(logits))) == _falling(logits)[:700]


@given(LOGITS, st.floats(0.01, 1))
def test_min_p_of_an_unsorted_set_keeps_its_order(logits: list[float], p: float) -> None:
    least = max(logits) + math.log(p)
    assume(all(abs(x - least) > 1e-4 for x in logits) or p == 1)
    kept = MinP(F(p), 0).apply(candidates(logits))
    assert ids(kept) == [i for i, x in enumerate(logits) if x >= least]
    assert not kept.is_sorted


@given(LOGITS, st.floats(0.01, 1), st.integers(2, 9))
def test_min_p_sorts_when_min_keep_wants_more(logits: list[float], p: float, keep: int) -> None:
    least = max(logits) + math.log(p)
    assume(all(abs(x - least) > 1e-4 for x in logits))
    order = _falling(logits)
    likely = sum(x >= least for x in logits)
    kept = MinP(F(p), keep).apply(candidates(logits))
    if likely >= keep:
        assert sorted(ids(kept)) == sorted(order[:likely])
    else:
        assert ids(kept) == order[:keep]
        assert kept.is_sorted


@given(LOGITS, st.floats(0.05, 0.99), st.integers(0, 5))
def test_typical_p(logits: list[float], p: float, min_keep: int) -> None:
    probs = _probs(logits)
    entropy = -sum(q * math.log(q) for q in probs)
    scores = [abs(-math.log(q) - entropy) for q in probs]
    order = sorted(range(len(probs)), key=lambda i: scores[i])
    assume(all(scores[b] - scores[a] > 1e-4 for a, b in pairwise(order)))
    mass = 0.0
    expected: list[int] = []
    for i in order:
        assume(abs(mass + probs[i] - p) > 1e-5)
        mass += probs[i]
        expected.append(i)
        if mass > p and len(expected) >= min_keep:
            break
    kept = TypicalP(F(p), min_keep).apply(candidates(logits))
    assert ids(kept) == expected
    assert not kept.is_sorted


def test_typical_p_with_a_forbidden_token_walks_the_order_of_a_sort_that_compared_nothing() -> None:
    # 0 * log 0 makes the entropy NaN. The order of 17 is the one checked against C++ below.
    order = [8, 16, 15, 14, 13, 12, 11, 10, 9, 0, 7, 6, 5, 4, 3, 2, 1]
    probs = [1 / 16] * 16 + [0.0]
    mass, expected = 0.0, []
    for i in order:
        mass += probs[i]
        expected.append(i)
        if mass > 0.7:
            break
    with np.errstate(all="ignore"):
        kept = TypicalP(F(0.7), 0).apply(candidates([1.0] * 16 + [-math.inf]))
    assert ids(kept) == expected


@pytest.mark.parametrize(
    ("size", "order"),
    [
        (16, list(range(16))),
        (17, [8, 16, 15, 14, 13, 12, 11, 10, 9, 0, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_unordered_sort_equals_libstdcxx(size: int, order: list[int]) -> None:
    # Printed by a C++ program: std::sort of 0..n-1 with a comparison that is always false.
    assert unordered_sort(size).tolist() == order


def test_unordered_sort_of_every_size_equals_libstdcxx() -> None:
    # The same program, hashing the orders of 0, 37, 74, ... < 3000 elements.
    value = 0
    for size in range(0, 3000, 37):
        for x in unordered_sort(size).tolist():
            value = (value * 31 + x) % 2**64
    assert value == 8900541197856135512


@given(LOGITS, st.floats(0.1, 4))
def test_top_n_sigma(logits: list[float], n: float) -> None:
    mean = sum(logits) / len(logits)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in logits) / len(logits))
    least = max(logits) - n * sigma
    assume(all(abs(x - least) > 1e-4 for x in logits))
    kept = TopNSigma(F(n)).apply(candidates([*logits, -math.inf]))
    assert len(kept) == len(logits) + 1
    expected = [x if x >= least else -math.inf for x in logits]
    assert kept.logits.tolist() == pytest.approx([*expected, -math.inf])


def test_top_n_sigma_leaves_one_candidate_and_no_finite_one_alone() -> None:
    for logits in ([1.0], [-math.inf, -math.inf]):
        assert TopNSigma(F(1)).apply(candidates(logits)).logits.tolist() == logits


def test_partial_sets_are_admitted_only_when_they_surely_hold_the_result() -> None:
    row = ArrayRow([5.0, 4.0, 4.0, 3.0, 3.0, 0.0], num_top=4)
    part = gather(row, np.empty(0, np.int32))
    assert TopK(3).admits(part)
    # The fourth is level with one that is not listed.
    assert not TopK(4).admits(part)
    assert MinP(F(math.exp(-1.5)), 0).admits(part)
    assert not MinP(F(math.exp(-2)), 0).admits(part)
    assert not MinP(F(math.exp(-1.5)), 4).admits(part)
    for stage in (TopP(F(0.1), 0), TypicalP(F(0.1), 0), TopNSigma(F(1))):
        assert not stage.admits(part)
