"""Pooling in chunks against the definition, norms against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.encoder_spec import ScoredState, ScoringSpec
from engine.model.scoring import ScoringHead
from engine.pooling import StatePooling, normalised
from engine.requests import Pooling
from engine.step import FloatArray

STATES = np.random.default_rng(1).standard_normal((12, 5)).astype(np.float32)
HEAD = ScoringHead(
    ScoringSpec(ScoredState.LAST, has_dense=False, num_outputs=2, is_softmax=True),
    {"cls.output.weight": np.random.default_rng(2).standard_normal((2, 5)).astype(np.float32)},
)
LOGITS = HEAD.arrays["cls.output.weight"].astype(np.float64) @ STATES[-1]
EXPECTED: dict[Pooling, FloatArray] = {
    Pooling.NONE: STATES,
    Pooling.MEAN: STATES.astype(np.float64).mean(0)[None].astype(np.float32),
    Pooling.CLS: STATES[:1],
    Pooling.LAST: STATES[-1:],
    Pooling.RANK: (np.exp(LOGITS) / np.exp(LOGITS).sum())[None].astype(np.float32),
}


@pytest.mark.parametrize("pooling", list(Pooling))
@given(cuts=st.sets(st.integers(1, 11)))
def test_chunks_do_not_show(pooling: Pooling, cuts: set[int]) -> None:
    pooled = StatePooling(pooling, HEAD)
    pooled.add(STATES[3:5])
    pooled = pooled.again()
    for part in np.split(STATES, sorted(cuts)):
        pooled.add(part)
    assert np.allclose(pooled.result(), EXPECTED[pooling], atol=1e-6)
    assert pooled.result().dtype == np.float32


@pytest.mark.parametrize("norm", [1, 2, 3, 7])
def test_p_norms(norm: int) -> None:
    vector = STATES[0]
    size = np.sum(np.abs(vector.astype(np.float64)) ** norm) ** (1 / norm)
    assert np.allclose(normalised(vector, norm), vector / size, rtol=1e-6)


def test_the_other_norms() -> None:
    vector = STATES[0]
    assert np.array_equal(normalised(vector, -1), vector)
    greatest = np.abs(vector).max()
    assert np.allclose(normalised(vector, 0), vector / greatest * 32760, rtol=1e-6)


@pytest.mark.parametrize("norm", [-1, 0, 2, 3, 2**31 - 1])
def test_zeros_and_huge_norms_stay_finite(norm: int) -> None:
    assert not normalised(np.zeros(4, np.float32), norm).any()
    assert np.isfinite(normalised(STATES[0] * np.float32(1e30), norm)).all()
