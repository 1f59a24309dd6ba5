from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.sampling.candidates import gather
from engine.sampling.temperature import DynamicTemperature, Temperature
from tests.unit.engine.sampling.support import ArrayRow, candidates, ids

F = np.float32


def test_temperature_divides_in_float32() -> None:
    logits = [0.1, 3.3, -7.7]
    result = Temperature(F(0.7)).apply(candidates(logits)).logits
    assert result.tolist() == [float(F(x) / F(0.7)) for x in logits]


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_0_keeps_only_the_first_largest(temperature: float) -> None:
    result = Temperature(F(temperature)).apply(candidates([1.0, 3.0, 3.0, -math.inf]))
    assert result.logits.tolist() == [-math.inf, 3.0, -math.inf, -math.inf]
    assert ids(result) == [0, 1, 2, 3]


def test_partial_sets_keep_their_bound_divided() -> None:
    part = gather(ArrayRow([4.0, 2.0, 1.0], num_top=2), np.empty(0, np.int32))
    assert Temperature(F(0.5)).admits(part)
    assert Temperature(F(0.5)).apply(part).unseen_max == 4.0
    assert Temperature(F(0)).apply(part).unseen_max == -math.inf


def test_temperature_0_needs_the_largest_to_be_listed() -> None:
    tied = gather(ArrayRow([2.0, 2.0, 2.0], num_top=2), np.empty(0, np.int32))
    assert not Temperature(F(0)).admits(tied)
    assert not DynamicTemperature(F(1), F(0.5), F(1)).admits(tied)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30, unique=True),
    st.floats(0.25, 2, width=32),
    st.floats(0.125, 1.5, width=32),
    st.floats(0.5, 2, width=32),
)
@example([8.0, -7.0], 1.0, 1.0, 1.0)  # all but certain: the entropy is what rounding leaves of it
def test_dynamic_temperature(
    logits: list[float], temperature: float, around: float, exponent: float
) -> None:
    powers = [math.exp(x - max(logits)) for x in logits]
    probs = [power / sum(powers) for power in powers]
    entropy = -sum(p * math.log(p) for p in probs) / math.log(len(probs))
    low, high = max(0.0, temperature - around), temperature + around
    # Probabilities are single precision: near 1 their logarithms, and the entropy, are no more exact.
    unsure = len(probs) * 2.0**-23 / math.log(len(probs))
    least, most = (
        low + (high - low) * max(0.0, entropy + by) ** exponent for by in (-unsure, unsure)
    )
    result = DynamicTemperature(F(temperature), F(around), F(exponent)).apply(candidates(logits))
    assert result.is_sorted
    for x, divided in zip(sorted(logits, reverse=True), result.logits.tolist(), strict=True):
        first, last = sorted((x / most, x / least if least else math.copysign(math.inf, x)))
        assert first - _near(first) <= divided <= last + _near(last)


def _near(value: float) -> float:
    return 1e-5 + 1e-3 * abs(value)


def test_dynamic_temperature_leaves_a_single_candidate_alone() -> None:
    result = DynamicTemperature(F(2), F(1), F(1)).apply(candidates([3.0]))
    assert result.logits.tolist() == [3.0]
