from __future__ import annotations

import math

import numpy as np
import pytest

from engine.sampling.candidates import Candidates
from engine.sampling.probabilities import (
    LOG_OF_ZERO,
    post_chain_probabilities,
    raw_probabilities,
)
from engine.sampling.stage import Pick
from tests.unit.engine.sampling.support import ArrayRow


def _pick(
    probs: list[float], *, selected: int, is_sorted: bool, ids: list[int] | None = None
) -> Pick:
    found = Candidates(
        np.array(ids or range(len(probs)), np.int32), np.zeros(len(probs), np.float32), is_sorted
    )
    return Pick(found, np.array(probs, np.float32), selected)


def test_raw_is_the_log_softmax_of_the_row_ties_by_id() -> None:
    logits = [1.0, 3.0, 2.0, 3.0]
    total = math.log(sum(math.exp(x) for x in logits))
    sampled, top = raw_probabilities(ArrayRow(logits), 2, 3)
    assert sampled == pytest.approx(2.0 - total)
    assert [token_id for token_id, _ in top] == [1, 3, 2]
    assert [value for _, value in top] == pytest.approx([3 - total, 3 - total, 2 - total])


@pytest.mark.parametrize(("n", "num_full"), [(0, 0), (4, 0), (5, 1), (99, 1)])
def test_raw_lists_as_many_as_asked_for_or_all(n: int, num_full: int) -> None:
    row = ArrayRow(np.arange(10, dtype=np.float32), num_top=4)
    _, top = raw_probabilities(row, 0, n)
    assert [token_id for token_id, _ in top] == list(range(9, -1, -1))[:n]
    assert row.num_full == num_full


def test_raw_of_a_probability_that_is_0_in_float32_is_the_least_float() -> None:
    sampled, top = raw_probabilities(ArrayRow([0.0, -200.0]), 1, 2)
    assert sampled == LOG_OF_ZERO == -float(np.finfo(np.float32).max)
    assert top == [(0, 0.0), (1, LOG_OF_ZERO)]


def test_post_chain_sorts_by_probability_and_ends_before_zero() -> None:
    pick = _pick([0.2, 0.0, 0.5, 0.3], selected=3, is_sorted=False)
    sampled, top = post_chain_probabilities(pick, 9)
    assert sampled == pytest.approx(math.log(0.3))
    assert [token_id for token_id, _ in top] == [2, 3, 0]
    assert [math.exp(value) for _, value in top] == pytest.approx([0.5, 0.3, 0.2])


def test_post_chain_keeps_the_order_of_a_sorted_chain() -> None:
    # adaptive_p changes probabilities but not the order, nor does the peer sort again.
    pick = _pick([0.2, 0.5, 0.3], selected=0, is_sorted=True, ids=[7, 3, 5])
    _, top = post_chain_probabilities(pick, 2)
    assert [token_id for token_id, _ in top] == [7, 3]


def test_post_chain_of_none_lists_none() -> None:
    pick = _pick([0.4] * 2000, selected=0, is_sorted=False)
    assert post_chain_probabilities(pick, 0) == (pytest.approx(math.log(0.4), abs=1e-6), [])


def test_post_chain_of_an_impossible_token_is_the_least_float() -> None:
    assert post_chain_probabilities(_pick([0.0, 1.0], selected=0, is_sorted=True), 1) == (
        LOG_OF_ZERO,
        [],
    )
