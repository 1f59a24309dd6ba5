from __future__ import annotations

import math

import numpy as np
import pytest

from engine.sampling.candidates import gather
from engine.sampling.dist import Dist, draw_discrete
from engine.sampling.mt19937 import Mt19937
from engine.sampling.temperature import Temperature
from tests.unit.engine.sampling.support import ArrayRow, candidates, from_probs

SEED = 42


def test_walks_the_candidates_in_their_order() -> None:
    probs = [0.2, 0.5, 0.3]
    dist, uniforms = Dist(SEED), Mt19937(SEED)
    for _ in range(200):
        uniform = uniforms.next_double()
        expected = next(i for i in range(3) if sum(probs[: i + 1]) >= uniform - 1e-6)
        pick = dist.pick(from_probs(probs))
        assert pick.token_id == expected
        assert pick.probs.tolist() == pytest.approx(probs)


def test_draws_too_when_one_candidate_is_left() -> None:
    dist, uniforms = Dist(SEED), Mt19937(SEED)
    pick = dist.pick(candidates([-3.0]))
    assert (pick.token_id, pick.probs.tolist()) == (0, [1.0])
    uniforms.next_double()
    assert dist.pick(from_probs([0.5, 0.5])).token_id == int(uniforms.next_double() > 0.5)


def test_with_every_token_forbidden_the_last_is_taken() -> None:
    with np.errstate(all="ignore"):
        pick = Dist(SEED).pick(candidates([-math.inf] * 3))
    assert pick.token_id == 2


def test_admits_a_partial_set_only_if_nothing_else_is_possible() -> None:
    part = gather(ArrayRow([2.0, 1.0, 0.0], num_top=2), np.empty(0, np.int32))
    assert not Dist(SEED).admits(part)
    assert Dist(SEED).admits(Temperature(np.float32(0)).apply(part))


def test_draw_discrete_equals_libstdcxx() -> None:
    # Printed by a C++ program: std::discrete_distribution over .1f .2f .3f .4f, mt19937(7).
    generator = Mt19937(7)
    weights = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    drawn = [draw_discrete(weights, generator) for _ in range(12)]
    assert drawn == [1, 2, 3, 2, 2, 1, 0, 2, 0, 2, 3, 2]


def test_draw_discrete_of_one_weight_draws_nothing() -> None:
    generator = Mt19937(SEED)
    assert draw_discrete(np.ones(1, np.float32), generator) == 0
    assert generator.next_u32() == Mt19937(SEED).next_u32()
