"""The short way of temperature 0 against a search over all logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.requests import Sampler, SamplingParams
from engine.sampling.chain import Chain
from engine.sampling.edits import LogitBias
from engine.sampling.greedy import Greedy
from engine.sampling.temperature import Temperature
from tests.unit.engine.sampling.support import ArrayRow, make_vocab

_ZERO = Temperature(np.float32(0))
_SIZE = 40
# Few different values, so that ties are everywhere, at the end of the listed ones too.
_LOGITS = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=_SIZE, max_size=_SIZE)


@given(_LOGITS, st.frozensets(st.integers(0, _SIZE - 1), max_size=_SIZE - 1), st.booleans())
def test_the_token_is_the_first_of_the_largest_allowed(
    logits: list[float], forbidden: frozenset[int], has_all: bool
) -> None:
    row = ArrayRow(logits, num_top=_SIZE if has_all else 8)
    params = SamplingParams(
        temperature=0.0, logit_bias=tuple((token_id, -math.inf) for token_id in forbidden)
    )
    chain = Chain(params, vocab=make_vocab(_SIZE), prompt=[], seed=1)
    allowed = [i for i in range(_SIZE) if i not in forbidden]
    best = min(allowed, key=lambda i: (-logits[i], i))
    assert chain.sample(row) == best
    assert chain.probabilities(3, post_chain=True) == (0.0, [(best, 0.0)])


def test_it_needs_no_more_than_the_listed_logits() -> None:
    row = ArrayRow(list(range(_SIZE)), num_top=8)
    pick = Greedy(frozenset({_SIZE - 1})).pick(row)
    assert pick is not None
    assert pick.token_id == _SIZE - 2
    assert row.num_full == 0


@pytest.mark.parametrize(
    ("logits", "forbidden"),
    [([1.0, 1.0, 1.0, 0.0], {0}), ([4.0, 3.0, 2.0, 1.0], {0, 1})],
    ids=["the best may tie with one that is not listed", "all listed ones are forbidden"],
)
def test_it_does_not_guess(logits: list[float], forbidden: set[int]) -> None:
    assert Greedy(frozenset(forbidden)).pick(ArrayRow(logits, num_top=2)) is None


def test_it_is_only_for_chains_that_forbid_and_take_the_best() -> None:
    favour = LogitBias([(3, 2.0)])
    assert Greedy.of([LogitBias([(3, -math.inf)]), _ZERO]) is not None
    assert Greedy.of([favour, _ZERO]) is None
    assert Greedy.of([Temperature(np.float32(0.5))]) is None
    assert Greedy.of([]) is None


def test_a_penalty_is_not_passed_by() -> None:
    params = SamplingParams(
        temperature=0.0, presence_penalty=9.0, samplers=(Sampler.PENALTIES, Sampler.TEMPERATURE)
    )
    chain = Chain(params, vocab=make_vocab(4), prompt=[], seed=1)
    row = ArrayRow([0.0, 2.0, 1.0, 0.5])
    assert [chain.sample(row) for _ in range(3)] == [1, 2, 3]
