from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.sampling.candidates import descending, gather, largest, softmax, whole
from tests.unit.engine.sampling.support import ArrayRow, candidates

# Few distinct values, so that ties are the rule; both zeros, which compare equal.
TIED = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1.0, 2.5, float("-inf"), float("inf")])


def _reference_order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@given(st.lists(TIED, min_size=1, max_size=60))
def test_descending_is_stable_on_few_values(values: list[float]) -> None:
    assert descending(np.array(values, np.float32)).tolist() == _reference_order(values)


@given(hnp.arrays(np.float32, 1500, elements=TIED), st.integers(0, 1600))
def test_descending_and_largest_are_stable_on_many_values(
    values: np.ndarray[tuple[int], np.dtype[np.float32]], count: int
) -> None:
    order = _reference_order(values.tolist())
    assert descending(values).tolist() == order
    assert largest(values, min(count, 1500)).tolist() == order[:count]


def test_largest_of_many_with_nan_still_gives_as_many() -> None:
    values = np.full(2000, np.nan, np.float32)
    assert len(largest(values, 5)) == 5


def test_softmax_sums_in_float32_and_in_order() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=500).astype(np.float32)
    powers = [np.float32(np.exp(np.float64(x - logits.max()))) for x in logits]
    total = np.float32(0)
    for power in powers:
        total = total + power
    expected = [power / total for power in powers]
    assert softmax(candidates(logits.tolist())).tolist() == [float(p) for p in expected]


def test_gathered_set_lists_best_and_edited_tokens_in_id_order() -> None:
    row = ArrayRow([0.5, 4.0, 3.0, 2.0, 1.0, 0.0], num_top=3)
    found = gather(row, np.array([5, 1, 5], np.int32))
    assert found.ids.tolist() == [1, 2, 3, 5]
    assert found.logits.tolist() == [4.0, 3.0, 2.0, 0.0]
    assert found.unseen_max == 2.0
    assert found.num_clear == 2
    assert found.hides(np.float32(2.0))
    assert not found.hides(np.float32(2.5))
    assert row.num_full == 0


def test_gathered_set_is_whole_when_the_best_are_all_there_are() -> None:
    found = gather(ArrayRow([1.0, 2.0]), np.array([0], np.int32))
    assert not found.is_partial
    assert found.ids.tolist() == [0, 1]


@pytest.mark.parametrize("shuffled", [False, True])
def test_find_locates_listed_tokens_only(shuffled: bool) -> None:
    base = whole(ArrayRow(np.arange(10, dtype=np.float32)))
    some = base.sorted() if shuffled else base
    some = some.take(some.ids % 2 == 0, is_sorted=False)
    at, found = some.find(np.array([4, 5, 0, 99], np.int32))
    assert found.tolist() == [True, False, True, False]
    assert some.ids[at].tolist() == [4, 0]
