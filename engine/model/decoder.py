"""The decoder: one step of a `ModelSpec` over paged state, as a pure function.

A step evaluates N = D + C tokens: D decode rows of one token each, then a chunk of C tokens of
one sequence. Layers that repeat are one `lax.scan`, so neither program size nor compile time grows
with depth. Norms, rope and softmax are f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels import flow
from engine.kernels.qmatmul import MatrixStack, gather_rows, qmatmul
from engine.model import rope as rope_
from engine.model.attention import KvPool, attend, write
from engine.model.spec import Activation, AttentionSpec, DenseFfnSpec, LayerSpec, ModelSpec
from engine.model.weights import LayerArrays, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Where each token goes and what each row may read; all int32.

    `tokens`, `positions`, `pages`, `offsets` are [N] (padding: token 0, position -1, page 0).
    `decode_tables` is [D, W], `chunk_table` [W]. `output_tokens` [D + 1] indexes the tokens whose
    logits are wanted, in the order decode rows, chunk. `wants_logits` is a scalar, 0 if none are.
    """

    tokens: jax.Array
    positions: jax.Array
    pages: jax.Array
    offsets: jax.Array
    decode_tables: jax.Array
    chunk_table: jax.Array
    output_tokens: jax.Array
    wants_logits: jax.Array


def forward(
    spec: ModelSpec, weights: Weights, pool: KvPool, step: StepInputs
) -> tuple[jax.Array, KvPool]:
    """Evaluates one step: f32 logits [D + 1, vocab] and the pool with this step's K/V in it."""
    embedding = cast(MatrixStack, weights.globals["token_embd"])
    x = gather_rows(weights.arena, embedding, step.tokens)
    first = 0
    for (layer, _, count), arrays in zip(spec.runs(), weights.runs, strict=True):
        x, pool = _run(spec, weights, layer, arrays, first, count, x, pool, step)
        first += count

    def logits() -> jax.Array:
        last = _rms_norm(
            x[step.output_tokens], _vector(weights.globals, "output_norm.weight"), spec
        )
        head = embedding if spec.tied_head else cast(MatrixStack, weights.globals["output"])
        return qmatmul(weights.arena, head, last)

    num_rows = step.output_tokens.shape[0]
    nothing = jnp.zeros((num_rows, spec.vocab_size), jnp.float32)
    # A chunk in the middle of a prompt needs no logits, and the head is the largest matrix.
    return flow.cond(step.wants_logits > 0, logits, lambda: nothing), pool


def _run(
    spec: ModelSpec,
    weights: Weights,
    layer: LayerSpec,
    arrays: LayerArrays,
    first: int,
    count: int,
    x: jax.Array,
    pool: KvPool,
    step: StepInputs,
) -> tuple[jax.Array, KvPool]:
    """A run of `count` equal layers, the first of which is layer `first` of the model."""
    rope = layer.mixer.rope
    factors = _vector(weights.globals, "rope_freqs.weight") if rope.has_factors else None
    cos, sin = rope_.angles(rope, jnp.maximum(step.positions, 0), factors)

    def block(
        carry: tuple[jax.Array, KvPool], scanned: tuple[jax.Array, LayerArrays]
    ) -> tuple[jax.Array, KvPool]:
        x, pool = carry
        index, own = scanned
        with jax.named_scope("attention"):
            normed = _rms_norm(x, _vector(own, "attn_norm.weight"), spec)
            mixed, pool = _attention(
                layer.mixer, weights.arena, own, index, normed, pool, step, cos, sin
            )
            x = x + mixed
        with jax.named_scope("ffn"):
            normed = _rms_norm(x, _vector(own, "ffn_norm.weight"), spec)
            x = x + _ffn(layer.ffn, weights.arena, own, normed)
        return x, pool

    indices = jnp.arange(first, first + count, dtype=jnp.int32)
    return flow.scan(block, (x, pool), (indices, arrays))


def _attention(
    mixer: AttentionSpec,
    arena: jax.Array,
    own: LayerArrays,
    index: jax.Array,
    x: jax.Array,
    pool: KvPool,
    step: StepInputs,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, KvPool]:
    num, dim = x.shape[0], mixer.head_dim
    queries = _linear(arena, own, "attn_q", mixer.biases, x).reshape(num, mixer.num_heads, dim)
    keys = _linear(arena, own, "attn_k", mixer.biases, x).reshape(num, mixer.num_kv_heads, dim)
    values = _linear(arena, own, "attn_v", mixer.biases, x).reshape(num, mixer.num_kv_heads, dim)
    queries = rope_.rotate(mixer.rope, queries, cos, sin)
    keys = rope_.rotate(mixer.rope, keys, cos, sin)
    pool = write(pool, index, step.pages, step.offsets, keys, values)

    num_decodes = step.decode_tables.shape[0]
    parts: list[jax.Array] = []
    if num_decodes:
        rows = queries[:num_decodes, None], step.positions[:num_decodes, None]
        parts.append(attend(mixer, pool, index, *rows, step.decode_tables)[:, 0])
    if num > num_decodes:
        chunk = queries[None, num_decodes:], step.positions[None, num_decodes:]
        parts.append(attend(mixer, pool, index, *chunk, step.chunk_table[None])[0])
    mixed = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
    return _linear(arena, own, "attn_output", mixer.biases, mixed), pool


def _ffn(ffn: DenseFfnSpec, arena: jax.Array, own: LayerArrays, x: jax.Array) -> jax.Array:
    gate = _linear(arena, own, "ffn_gate", ffn.biases, x)
    up = _linear(arena, own, "ffn_up", ffn.biases, x)
    return _linear(arena, own, "ffn_down", ffn.biases, _ACTIVATIONS[ffn.activation](gate) * up)


_ACTIVATIONS = {Activation.SILU: jax.nn.silu}


def _linear(
    arena: jax.Array, own: LayerArrays, name: str, biases: frozenset[str], x: jax.Array
) -> jax.Array:
    y = qmatmul(arena, cast(MatrixStack, own[name]), x)
    return y + _vector(own, f"{name}.bias") if name in biases else y


def _rms_norm(x: jax.Array, weight: jax.Array, spec: ModelSpec) -> jax.Array:
    """Source: Zhang and Sennrich 2019."""
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + spec.norm_eps) * weight


def _vector(arrays: LayerArrays, name: str) -> jax.Array:
    return cast(jax.Array, arrays[name])
