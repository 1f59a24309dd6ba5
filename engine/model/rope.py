"""Rotary position embedding, in f32.

Source: Su et al. 2021 (RoFormer); pairings as in llama.cpp's ROPE_TYPE_NORM and ROPE_TYPE_NEOX.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from engine.model.spec import RopePairing, RopeSpec

_LEAST_RAMP = 1e-3  # pairs; a ramp of no length is a step


def angles(
    rope: RopeSpec, positions: jax.Array, factors: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines times the magnitude, f32 [N, dims // 2] each, for int32 positions [N].

    `factors` is f32 [dims // 2] and divides the frequencies.
    """
    exponents = np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims
    scaled = _position_scales(rope) * rope.base**-exponents
    frequencies = jnp.asarray(scaled.astype(np.float32))
    if factors is not None:
        frequencies = frequencies / factors
    theta = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(theta) * rope.magnitude, jnp.sin(theta) * rope.magnitude


def _position_scales(rope: RopeSpec) -> npt.NDArray[np.float64]:
    """What multiplies the positions of each pair, [dims // 2]."""
    if rope.yarn_ramp is None:
        return np.full(rope.dims // 2, rope.position_scale)
    low, high = rope.yarn_ramp
    part = (np.arange(rope.dims // 2) - low) / max(_LEAST_RAMP, high - low)
    scaled = np.clip(part, 0.0, 1.0)
    return scaled * rope.position_scale + (1.0 - scaled)


def rotate(pairing: RopePairing, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first components of every head, f32 [N, heads, head_dim].

    `cos` and `sin` are [N, dims // 2]; components past `dims` stay as they are.
    """
    num, heads, _ = x.shape
    dims = 2 * cos.shape[-1]
    turned, rest = x[..., :dims], x[..., dims:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if pairing is RopePairing.NORM:
        pairs = turned.reshape(num, heads, dims // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        out = jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
    return jnp.concatenate([out, rest], -1)
