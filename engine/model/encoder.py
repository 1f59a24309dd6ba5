"""The encoder: whole texts in, the final state of each of their tokens out, as a pure function.

Layers are one `lax.scan`, as in the decoder, whose blocks it shares; nothing is kept between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from engine.kernels import flow
from engine.kernels.qmatmul import MatrixStack, gather_rows
from engine.model.context import Products, turns_of, vector
from engine.model.ffn import dense_ffn
from engine.model.grouped_query import project
from engine.model.rope import rotate
from engine.model.spec import AttentionSpec, DenseFfnSpec, ModelSpec
from engine.model.tensors import INPUT_NORM, SUM_NORMS
from engine.model.text_attention import TextBlocks, attend_texts
from engine.model.weights import LayerArrays, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextInputs:
    """Texts one after another: `tokens` and their `positions` within a text, int32 [N]."""

    tokens: jax.Array
    positions: jax.Array
    blocks: TextBlocks


def encode(spec: ModelSpec, weights: Weights, texts: TextInputs) -> jax.Array:
    """Returns the final states of all tokens, f32 [N, width]."""
    products = Products(spec=spec, weights=weights)
    turns = turns_of(spec, weights, texts.positions)
    # Layers of an encoder are equal, so they are one run.
    (block, _), arrays = spec.runs()[0], weights.runs[0]
    mixer, ffn = block.mixer, block.ffn
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(ffn, DenseFfnSpec)

    def layer(x: jax.Array, own: LayerArrays) -> jax.Array:
        after_attention, after_ffn = SUM_NORMS
        with jax.named_scope("mixer"):
            y = _attention(products, mixer, own, x, turns, texts.blocks)
            x = _norm(products, own, after_attention, x + y)
        with jax.named_scope("ffn"):
            return _norm(products, own, after_ffn, x + dense_ffn(products, ffn, own, x))

    return flow.scan(layer, _embedded(products, texts), arrays)


def _embedded(products: Products, texts: TextInputs) -> jax.Array:
    """What goes into the first block; see `EncoderSpec`."""
    spec, weights = products.spec, products.weights
    assert spec.encoder is not None

    def rows(name: str, ids: jax.Array) -> jax.Array:
        return gather_rows(weights.arena, cast(MatrixStack, weights.globals[name]), ids)

    x = rows("token_embd", texts.tokens)
    if spec.encoder.num_token_types:
        x = x + rows("token_types", jnp.zeros(1, jnp.int32))
    if spec.encoder.has_positions:
        x = x + rows("position_embd", texts.positions)
    return _norm(products, weights.globals, INPUT_NORM, x)


def _norm(products: Products, own: LayerArrays, name: str, x: jax.Array) -> jax.Array:
    return products.layer_norm(x, vector(own, f"{name}.weight"), vector(own, f"{name}.bias"))


def _attention(
    products: Products,
    mixer: AttentionSpec,
    own: LayerArrays,
    x: jax.Array,
    turns: tuple[jax.Array, jax.Array],
    blocks: TextBlocks,
) -> jax.Array:
    queries, keys, values, _ = project(products, mixer, own, x)
    if mixer.has_rope:
        (cos,), (sin,), pairing = turns[0], turns[1], products.spec.ropes[0].pairing
        queries, keys = rotate(pairing, queries, cos, sin), rotate(pairing, keys, cos, sin)
    mixed = attend_texts(mixer, queries, keys, values, blocks)
    return products.linear(own, "attn_output", mixed, mixer.biases)
