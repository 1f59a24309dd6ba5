"""The native log-sum-exp against its definition in float64, and against itself bit by bit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import native
from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.jitted import jitted

pytestmark = requires_native

COLS = [1, 2, 15, 16, 17, 512, 50_001]

Float32 = npt.NDArray[np.float32]

log_sum_exp = jitted(native.log_sum_exp)


def run(x: Float32) -> Float32:
    return np.asarray(log_sum_exp(jnp.asarray(x)))


def make(num: int, cols: int, spread: float = 5.0) -> Float32:
    rng = np.random.default_rng([num, cols])
    return (rng.standard_normal((num, cols)) * spread + 3).astype(np.float32)


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("spread", [0.01, 5.0, 300.0])
def test_it_is_the_definition(cols: int, spread: float) -> None:
    x = make(4, cols, spread)
    expected = np.logaddexp.reduce(x.astype(np.float64), axis=-1)
    np.testing.assert_allclose(run(x), expected, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("cols", COLS)
def test_every_bit_is_the_same_alone_in_company_and_on_every_instruction_set(cols: int) -> None:
    x = make(40, cols)
    expected = run(x).view(np.int32)
    for name in instruction_sets():
        with instructions(name):
            for num in (1, 2, 8, 40):
                np.testing.assert_array_equal(run(x[-num:]).view(np.int32), expected[-num:], name)


def test_a_value_that_is_not_finite_shows_in_its_row_alone() -> None:
    x = make(4, 100)
    x[1, 99], x[2, 3] = np.nan, np.inf
    result = run(x)
    assert not np.isfinite(result[1:3]).any()
    assert np.isfinite(result[[0, 3]]).all()


def test_what_cannot_be_chosen_counts_nothing() -> None:
    x = make(1, 40)
    padded = np.concatenate([x, np.full((1, 9), -np.inf, np.float32)], axis=1)
    np.testing.assert_allclose(run(padded), run(x), rtol=1e-7)
