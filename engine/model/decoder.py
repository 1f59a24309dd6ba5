"""The decoder: one step of a `ModelSpec` over paged state, as a pure function.

A step evaluates N = D + C tokens: D decode rows of one token each, then a chunk of C tokens of
one sequence. Layers that repeat are one `lax.scan`, so neither program size nor compile time grows
with depth; what differs between them (window, rope, place in the pool) is data. Norms, rope and
softmax are f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels import flow, native
from engine.kernels.qmatmul import MatrixStack, gather_rows, qmatmul, qmatmuls
from engine.model.attention import KvPool, Rows, attend_step
from engine.model.place import Place
from engine.model.rope import angles, rotate
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    ModelSpec,
    QkNorm,
)
from engine.model.weights import LayerArrays, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Where each token goes and what each row may read; all int32.

    The K kinds of pool are full (0) and, in models that have it, window (1). `tokens`, `positions`
    and `offsets` are [N], `pages` is [K, N] (padding: token 0, position -1, page 0). `tables` is
    [K, R, W] for D decode rows and, last, the chunk. `outputs` [R] indexes the tokens whose logits
    are wanted, in the order of rows; `wants_logits` is a scalar, 0 if none are.
    """

    tokens: jax.Array
    positions: jax.Array
    offsets: jax.Array
    pages: jax.Array
    tables: jax.Array
    outputs: jax.Array
    wants_logits: jax.Array


@dataclass(frozen=True)
class _Context:
    """What every layer of a step shares. `turns` are cos and sin, f32 [ropes, N, dims // 2]."""

    spec: ModelSpec
    weights: Weights
    step: StepInputs
    num_decodes: int
    turns: tuple[jax.Array, jax.Array]

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Root-mean-square norm over the last axis.

        Source: Zhang and Sennrich 2019.
        """
        if self.weights.is_native:
            return native.norm(x, weight, self.spec.norm_eps)
        mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * lax.rsqrt(mean_square + self.spec.norm_eps) * weight


def forward(
    spec: ModelSpec,
    weights: Weights,
    places: Place,
    pool: KvPool,
    step: StepInputs,
    num_decodes: int,
) -> tuple[jax.Array, KvPool]:
    """Evaluates one step.

    Args:
        spec: The model, at its context (`ModelSpec.at_context`).
        weights: Its weights.
        places: One entry per layer.
        pool: Keys and values; the result holds this step's too.
        step: What to evaluate.
        num_decodes: D; static.

    Returns:
        f32 logits [R, vocab] and the pool.
    """
    context = _Context(spec, weights, step, num_decodes, _turns(spec, weights, step.positions))
    embedding = cast(MatrixStack, weights.globals["token_embd"])
    x = gather_rows(weights.arena, embedding, step.tokens)
    if spec.embedding_scale != 1.0:
        x = x * spec.embedding_scale
    for (block, first, count), arrays in zip(spec.runs(), weights.runs, strict=True):
        x, pool = _run(context, block, arrays, places.part(first, count), x, pool)
    nothing = jnp.zeros((step.outputs.shape[0], spec.vocab_size), jnp.float32)
    # A chunk in the middle of a prompt needs no logits, and the head is the largest matrix.
    logits = flow.cond(step.wants_logits > 0, lambda: _head(context, x), lambda: nothing)
    return logits, pool


def _turns(spec: ModelSpec, weights: Weights, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every rope of the model, f32 [ropes, N, dims // 2] each."""
    places = jnp.maximum(positions, 0)
    all_turns = [
        angles(rope, places, _vector(weights.globals, rope.factors) if rope.factors else None)
        for rope in spec.ropes
    ]
    return jnp.stack([cos for cos, _ in all_turns]), jnp.stack([sin for _, sin in all_turns])


def _head(context: _Context, x: jax.Array) -> jax.Array:
    """Logits of the tokens that want them, f32 [R, vocab]."""
    spec, weights = context.spec, context.weights
    last = context.norm(x[context.step.outputs], _vector(weights.globals, "output_norm.weight"))
    head = weights.globals["token_embd" if spec.tied_head else "output"]
    logits = qmatmul(weights.arena, cast(MatrixStack, head), last)
    if spec.has_head_bias:
        logits = logits + _vector(weights.globals, "output.bias")
    return _soft_capped(logits, spec.logit_soft_cap)


def _run(
    context: _Context,
    block: BlockSpec,
    arrays: LayerArrays,
    places: Place,
    x: jax.Array,
    pool: KvPool,
) -> tuple[jax.Array, KvPool]:
    """A run of equal blocks: `arrays` and `places` have one entry per layer of it."""

    def layer(
        carry: tuple[jax.Array, KvPool], scanned: tuple[LayerArrays, Place]
    ) -> tuple[jax.Array, KvPool]:
        x, pool = carry
        own, place = scanned
        with jax.named_scope("attention"):
            y = context.norm(x, _vector(own, "attn_norm.weight")) if block.has_pre_norms else x
            y, pool = _attention(context, block.mixer, own, place, y, pool)
            if block.has_post_norms:
                y = context.norm(y, _vector(own, "post_attention_norm.weight"))
            x = x + y
        with jax.named_scope("ffn"):
            y = context.norm(x, _vector(own, "ffn_norm.weight")) if block.has_pre_norms else x
            y = _ffn(block.ffn, context.weights.arena, own, y)
            if block.has_post_norms:
                y = context.norm(y, _vector(own, "post_ffw_norm.weight"))
            x = x + y
        return x, pool

    return flow.scan(layer, (x, pool), (arrays, places))


def _attention(
    context: _Context,
    mixer: AttentionSpec,
    own: LayerArrays,
    place: Place,
    x: jax.Array,
    pool: KvPool,
) -> tuple[jax.Array, KvPool]:
    step = context.step
    pairing = context.spec.ropes[0].pairing
    cos, sin = context.turns[0][place.rope_id], context.turns[1][place.rope_id]
    queries, keys, values = _projections(context, mixer, own, x)
    queries = rotate(pairing, queries, cos, sin)
    keys = rotate(pairing, keys, cos, sin)
    rows = Rows(
        positions=step.positions,
        units=step.pages[place.kind] + place.first_unit,
        offsets=step.offsets,
        tables=step.tables[place.kind] + place.first_unit,
    )
    mixed, pool = attend_step(
        mixer,
        pool,
        queries,
        keys,
        values,
        rows,
        place.window,
        num_decodes=context.num_decodes,
        is_native=context.weights.is_native,
    )
    return _linear(context.weights.arena, own, "attn_output", mixer.biases, mixed), pool


def _projections(
    context: _Context, mixer: AttentionSpec, own: LayerArrays, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values before rope, f32 [N, heads, head_dim] each."""
    arena, dim = context.weights.arena, mixer.head_dim
    if mixer.is_fused:
        fused = _linear(arena, own, "attn_qkv", mixer.biases, x)
        first = mixer.num_heads * dim
        second = first + mixer.num_kv_heads * dim
        queries, keys, values = jnp.split(fused, [first, second], axis=-1)
    else:
        names = ("attn_q", "attn_k", "attn_v")
        queries, keys, values = _linears(arena, own, names, mixer.biases, x)
    if mixer.qk_norm is QkNorm.FULL:
        queries = context.norm(queries, _vector(own, "attn_q_norm.weight"))
        keys = context.norm(keys, _vector(own, "attn_k_norm.weight"))
    queries = queries.reshape(-1, mixer.num_heads, dim)
    keys, values = (y.reshape(-1, mixer.num_kv_heads, dim) for y in (keys, values))
    if mixer.qk_norm is QkNorm.HEAD:
        queries = context.norm(queries, _vector(own, "attn_q_norm.weight"))
        keys = context.norm(keys, _vector(own, "attn_k_norm.weight"))
    return queries, keys, values


def _ffn(ffn: DenseFfnSpec, arena: jax.Array, own: LayerArrays, x: jax.Array) -> jax.Array:
    if ffn.is_fused:
        gate, up = jnp.split(_linear(arena, own, "ffn_up", ffn.biases, x), 2, axis=-1)
    else:
        gate, up = _linears(arena, own, ("ffn_gate", "ffn_up"), ffn.biases, x)
    gated = _activated(ffn.activation, gate) * up
    return _linear(arena, own, "ffn_down", ffn.biases, gated)


def _activated(activation: Activation, x: jax.Array) -> jax.Array:
    if activation is Activation.GELU:
        return jax.nn.gelu(x, approximate=True)
    return jax.nn.silu(x)


def _linear(
    arena: jax.Array, own: LayerArrays, name: str, biases: frozenset[str], x: jax.Array
) -> jax.Array:
    return _linears(arena, own, (name,), biases, x)[0]


def _linears(
    arena: jax.Array,
    own: LayerArrays,
    names: tuple[str, ...],
    biases: frozenset[str],
    x: jax.Array,
) -> list[jax.Array]:
    """Projections of one input, biases added."""
    products = qmatmuls(arena, [cast(MatrixStack, own[name]) for name in names], x)
    return [
        y + _vector(own, f"{name}.bias") if name in biases else y
        for name, y in zip(names, products, strict=True)
    ]


def _soft_capped(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x


def _vector(arrays: LayerArrays, name: str) -> jax.Array:
    return cast(jax.Array, arrays[name])
