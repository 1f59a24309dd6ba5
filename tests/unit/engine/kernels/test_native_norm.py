"""The native norm against its definition in float64, and against itself bit by bit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import native
from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.jitted import jitted

pytestmark = requires_native

EPSILON = 1e-5
COLS = [1, 3, 16, 17, 64, 100, 576, 2048]

Float32 = npt.NDArray[np.float32]


def make(num: int, cols: int) -> tuple[Float32, Float32]:
    rng = np.random.default_rng([num, cols])
    return rng.standard_normal((num, cols), np.float32), rng.standard_normal(cols, np.float32)


norm = jitted(native.norm, static_argnums=2)


def run(x: Float32, weight: Float32) -> Float32:
    return np.asarray(norm(jnp.asarray(x), jnp.asarray(weight), EPSILON))


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("num", [1, 7, 300])
def test_it_is_the_definition(num: int, cols: int) -> None:
    x, weight = make(num, cols)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * weight
    np.testing.assert_allclose(run(x, weight), expected, rtol=1e-6, atol=0)


def test_it_takes_rows_of_heads() -> None:
    x, weight = make(40, 64)
    heads = run(x.reshape(5, 8, 64), weight)
    np.testing.assert_array_equal(heads.reshape(40, 64), run(x, weight))


@pytest.mark.parametrize("cols", COLS)
def test_every_bit_is_the_same_alone_in_company_and_on_every_instruction_set(cols: int) -> None:
    x, weight = make(300, cols)
    expected = run(x, weight).view(np.int32)
    for name in instruction_sets():
        with instructions(name):
            for num in (1, 2, 8, 300):
                found = run(x[-num:], weight).view(np.int32)
                np.testing.assert_array_equal(found, expected[-num:], name)


def test_a_value_that_is_not_finite_shows_in_its_row_alone() -> None:
    x, weight = make(3, 100)
    x[1, 99] = np.nan
    result = run(x, weight)
    assert np.isnan(result[1]).all()
    assert np.isfinite(result[[0, 2]]).all()


def test_zeros_stay_zeros_and_no_rows_are_no_work() -> None:
    weight = make(1, 32)[1]
    assert not run(np.zeros((2, 32), np.float32), weight).any()
    assert run(np.zeros((0, 32), np.float32), weight).shape == (0, 32)


def test_a_weight_of_another_length_is_refused() -> None:
    x, _ = make(2, 32)
    with pytest.raises((RuntimeError, ValueError), match="norm: shapes differ"):
        run(x, make(1, 16)[1])
