"""The dense feed-forward, and the gated activations that experts share with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.model.context import Context
from engine.model.spec import Activation, DenseFfnSpec
from engine.model.weights import LayerArrays


def dense_ffn(context: Context, ffn: DenseFfnSpec, own: LayerArrays, x: jax.Array) -> jax.Array:
    """Returns `down(activation(gate(x)) * up(x))` of f32 [N, width]."""
    if ffn.is_fused:
        gate, up = jnp.split(context.linear(own, "ffn_up", x, ffn.biases), 2, axis=-1)
    else:
        gate, up = context.linears(own, ("ffn_gate", "ffn_up"), x, ffn.biases)
    return context.linear(own, "ffn_down", gated(ffn.activation, gate, up), ffn.biases)


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `activation(gate) * up`."""
    if activation is Activation.GELU:
        return jax.nn.gelu(gate, approximate=True) * up
    return jax.nn.silu(gate) * up
