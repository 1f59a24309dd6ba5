"""Grouped-query attention as a mixer: projections, norms and rope around the paged attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from engine.model.attention import KvPool, Rows, attend_step
from engine.model.context import Context, Products, vector
from engine.model.place import Place
from engine.model.rope import rotate
from engine.model.spec import AttentionSpec, QkNorm
from engine.model.weights import LayerArrays


def grouped_query_attention(
    context: Context,
    mixer: AttentionSpec,
    own: LayerArrays,
    place: Place,
    x: jax.Array,
    pool: KvPool,
) -> tuple[jax.Array, KvPool]:
    """Mixes f32 [N, width]; the pool that is returned holds this step's keys and values."""
    queries, keys, values, gate = project(context, mixer, own, x)
    if mixer.has_rope:
        pairing = context.spec.ropes[0].pairing
        cos, sin = context.turns[0][place.rope_id], context.turns[1][place.rope_id]
        queries, keys = rotate(pairing, queries, cos, sin), rotate(pairing, keys, cos, sin)
    mixed, pool = attend_step(
        mixer,
        pool,
        queries,
        keys,
        values,
        rows_of(context, place),
        place.window,
        vector(own, "attn_sinks.weight") if mixer.has_sinks else None,
        num_decodes=context.num_decodes,
        is_native=context.weights.is_native,
    )
    if gate is not None:
        mixed = mixed * jax.nn.sigmoid(gate)
    return context.linear(own, "attn_output", mixed, mixer.biases), pool


def rows_of(context: Context, place: Place) -> Rows:
    """Where a step's tokens lie in one layer."""
    step = context.step
    return Rows(
        positions=step.positions,
        units=step.pages[place.kind] + place.first_unit,
        offsets=step.offsets,
        tables=step.tables[place.kind] + place.first_unit,
    )


def project(
    context: Products, mixer: AttentionSpec, own: LayerArrays, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries, keys and values before rope, f32 [N, heads, head_dim], and a gate of the result."""
    dim, gate = mixer.head_dim, None
    if mixer.is_fused:
        (fused,) = context.linears(own, ("attn_qkv",), x, mixer.biases, is_fine=True)
        first = mixer.num_heads * dim
        second = first + mixer.num_kv_heads * dim
        queries, keys, values = jnp.split(fused, [first, second], axis=-1)
    else:
        names = ("attn_q", "attn_k", "attn_v")
        # Scores go into an exponential: what is rounded here is most of what a step gets wrong.
        queries, keys, values = context.linears(own, names, x, mixer.biases, is_fine=True)
    if mixer.has_gate:
        by_head = queries.reshape(-1, mixer.num_heads, 2, dim)
        queries, gate = by_head[:, :, 0], by_head[:, :, 1].reshape(len(x), -1)
    if mixer.qk_norm is QkNorm.FULL:
        queries = context.norm(queries, vector(own, "attn_q_norm.weight"))
        keys = context.norm(keys, vector(own, "attn_k_norm.weight"))
    queries = queries.reshape(-1, mixer.num_heads, dim)
    keys, values = (y.reshape(-1, mixer.num_kv_heads, dim) for y in (keys, values))
    if mixer.qk_norm is QkNorm.HEAD:
        queries = context.norm(queries, vector(own, "attn_q_norm.weight"))
        keys = context.norm(keys, vector(own, "attn_k_norm.weight"))
    return queries, keys, values, gate
