from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from engine.model.rope import angles, rotate
from engine.model.spec import RopePairing, RopeSpec

NORM, NEOX = RopePairing.NORM, RopePairing.NEOX
FACTORS = np.array([1.0, 2.0, 3.0, 8.0], np.float32)


def reference(
    rope: RopeSpec, x: npt.NDArray[np.float32], position: int, factors: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """One head as complex numbers, in float64."""
    turned, half = x[: rope.dims].astype(np.float64), rope.dims // 2
    theta = position * rope.position_scale * rope.base ** (-2 * np.arange(half) / rope.dims)
    turn = rope.magnitude * np.exp(1j * theta / factors.astype(np.float64))
    result = x.astype(np.float64)
    if rope.pairing is NORM:
        z = (turned[0::2] + 1j * turned[1::2]) * turn
        result[0 : rope.dims : 2], result[1 : rope.dims : 2] = z.real, z.imag
    else:
        z = (turned[:half] + 1j * turned[half:]) * turn
        result[:half], result[half : rope.dims] = z.real, z.imag
    return result


@pytest.mark.parametrize(
    ("rope", "factors"),
    [
        (RopeSpec(NORM, dims=8, base=10000.0), None),
        (RopeSpec(NEOX, dims=8, base=10000.0), None),
        (RopeSpec(NORM, dims=8, base=500000.0, position_scale=0.25), FACTORS),
        (RopeSpec(NEOX, dims=8, base=10000.0, magnitude=1.19), FACTORS),
        (RopeSpec(NORM, dims=4, base=100.0), None),
        (RopeSpec(NEOX, dims=6, base=1e6, position_scale=0.5), None),
    ],
    ids=["norm", "neox", "norm-scaled-factors", "neox-magnitude-factors", "norm-part", "neox-part"],
)
def test_heads_turn_by_their_position(
    rope: RopeSpec, factors: npt.NDArray[np.float32] | None
) -> None:
    positions = np.array([0, 1, 7, 100, 511], np.int32)
    x = np.random.default_rng(0).standard_normal((5, 3, 8), np.float32)
    cos, sin = angles(
        rope, jnp.asarray(positions), None if factors is None else jnp.asarray(factors)
    )
    assert cos.shape == sin.shape == (5, rope.dims // 2)
    result = np.asarray(rotate(rope.pairing, jnp.asarray(x), cos, sin))
    ones = np.ones(rope.dims // 2, np.float32)
    for n, position in enumerate(positions):
        for head in range(3):
            expected = reference(
                rope, x[n, head], int(position), ones if factors is None else factors
            )
            # An angle of 511 has an f32 spacing of 3e-5.
            np.testing.assert_allclose(result[n, head], expected, rtol=0, atol=2e-4)


def test_what_is_not_turned_stays_bit_for_bit() -> None:
    rope = RopeSpec(NEOX, dims=2, base=10000.0)
    x = np.random.default_rng(0).standard_normal((1, 2, 8), np.float32)
    cos, sin = angles(rope, jnp.array([5], jnp.int32), None)
    result = np.asarray(rotate(NEOX, jnp.asarray(x), cos, sin))
    np.testing.assert_array_equal(result[..., 2:], x[..., 2:])
    assert not np.array_equal(result[..., :2], x[..., :2])


def test_position_0_turns_nothing() -> None:
    rope = RopeSpec(NORM, dims=8, base=10000.0)
    x = np.random.default_rng(0).standard_normal((1, 2, 8), np.float32)
    cos, sin = angles(rope, jnp.zeros(1, jnp.int32), None)
    np.testing.assert_array_equal(np.asarray(rotate(NORM, jnp.asarray(x), cos, sin)), x)


@pytest.mark.parametrize(
    ("ramp", "scales"),
    [
        ((0.0, 4.0), [1.0, 0.8125, 0.625, 0.4375]),
        ((1.0, 3.0), [1.0, 1.0, 0.625, 0.25]),
        ((2.0, 2.0), [1.0, 1.0, 1.0, 0.25]),
    ],
)
def test_yarn_scales_slow_pairs_alone(ramp: tuple[float, float], scales: list[float]) -> None:
    rope = RopeSpec(NORM, dims=8, base=100.0, position_scale=0.25, yarn_ramp=ramp)
    cos, sin = angles(rope, jnp.array([3], jnp.int32), None)
    frequencies = 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(
        np.arctan2(sin, cos)[0], 3 * np.array(scales) * frequencies, rtol=1e-6
    )
