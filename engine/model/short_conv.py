"""LFM2's mixer: a gated short convolution. Its step and its chunked form are the convolution's."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.model.context import Context, vector
from engine.model.convolution import convolve
from engine.model.place import Place
from engine.model.states import StatePool, StateRows
from engine.model.weights import LayerArrays


def mix(
    context: Context, own: LayerArrays, place: Place, x: jax.Array, pool: StatePool
) -> tuple[jax.Array, StatePool]:
    """What the mixer makes of f32 [N, width], and the states after it."""
    rows = StateRows.of(context, place)
    before, after, values = jnp.split(context.linear(own, "shortconv.in_proj", x), 3, axis=-1)
    kernel = vector(own, "shortconv.conv.weight")
    y, conv = convolve(context, rows, pool.conv, before * values, kernel, None)
    return context.linear(own, "shortconv.out_proj", after * y), StatePool(conv, None)
