"""The dense feed-forward, and the gated activations that experts share with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.model.context import Products
from engine.model.spec import Activation, DenseFfnSpec
from engine.model.weights import LayerArrays

# Source: OpenAI 2025 (gpt-oss); llama.cpp's swiglu_oai.
_SWIGLU_LIMIT = 7.0
_SWIGLU_SLOPE = 1.702


def dense_ffn(
    context: Products, ffn: DenseFfnSpec, own: LayerArrays, x: jax.Array, suffix: str = ""
) -> jax.Array:
    """Returns the feed-forward of f32 [N, width]; see `DenseFfnSpec`.

    `suffix` ends the names of the matrices.
    """
    if not ffn.is_gated:
        inner = activated(ffn.activation, context.linear(own, "ffn_up", x, ffn.biases))
        return context.linear(own, "ffn_down", inner, ffn.biases)
    if ffn.is_fused:
        gate, up = jnp.split(context.linear(own, f"ffn_up{suffix}", x, ffn.biases), 2, axis=-1)
    else:
        names = (f"ffn_gate{suffix}", f"ffn_up{suffix}")
        gate, up = context.linears(own, names, x, ffn.biases)
    inner = gated(ffn.activation, gate, up)
    return context.linear(own, f"ffn_down{suffix}", inner, ffn.biases)


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `activation(gate) * up`, see `Activation`."""
    if activation is Activation.CLAMPED_SWIGLU:
        gate = jnp.minimum(gate, _SWIGLU_LIMIT)
        up = jnp.clip(up, -_SWIGLU_LIMIT, _SWIGLU_LIMIT) + 1.0
        return gate * jax.nn.sigmoid(_SWIGLU_SLOPE * gate) * up
    return activated(activation, gate) * up


def activated(activation: Activation, x: jax.Array) -> jax.Array:
    """Returns `activation(x)`, of one that needs no other input."""
    return jax.nn.gelu(x, approximate=True) if activation is Activation.GELU else jax.nn.silu(x)
