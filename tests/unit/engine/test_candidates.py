"""The candidates of a step against a sort of all logits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine import pool_programs
from tests.unit.engine.best_logits import best_by_definition
from tests.unit.engine.jitted import jitted

candidates = jitted(pool_programs._candidates)  # pyright: ignore[reportPrivateUsage] -- a pure function with a large input space


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 512, 1000, 64 * 128, 64 * 128 + 1, 20_000])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_candidates_are_the_best_with_ties_by_id(vocab: int, data: st.DataObject) -> None:
    # Few different values: most are ties, within groups of neighbours and across them.
    kinds = data.draw(st.integers(1, 300))
    seed = data.draw(st.integers(0, 2**32))
    logits = np.random.default_rng(seed).integers(-kinds, kinds, (2, vocab)).astype(np.float32)
    ids, best = candidates(jnp.asarray(logits + 0.5))
    expected = best_by_definition(logits)
    np.testing.assert_array_equal(np.asarray(ids), expected)
    np.testing.assert_array_equal(
        np.asarray(best), np.take_along_axis(logits, expected, -1) + np.float32(0.5)
    )


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float32, (1, 9000), elements=st.floats(-50, 50, width=16), fill=st.just(0.25)))
def test_a_few_outliers_among_equal_logits_are_found(logits: npt.NDArray[np.float32]) -> None:
    logits = logits + np.float32(0)  # -0.0 equals 0.0 to numpy and not to XLA
    np.testing.assert_array_equal(
        np.asarray(candidates(jnp.asarray(logits))[0]), best_by_definition(logits)
    )
