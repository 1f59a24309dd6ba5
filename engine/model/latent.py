"""Multi-head latent attention as a mixer.

Absorbed, it is attention of all heads over one key per token, whose first components are the value
too; otherwise keys and values of every head are made and kept.

Source: DeepSeek-AI 2024 (DeepSeek-V2); the graph of llama.cpp's deepseek2.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from engine.kernels.qmatmul import MatrixStack, expert_products
from engine.model.attention import KvPool, attend_step
from engine.model.context import Context, vector
from engine.model.grouped_query import rows_of
from engine.model.place import Place
from engine.model.rope import rotate
from engine.model.spec import LatentAttentionSpec
from engine.model.weights import LayerArrays


def latent_attention(
    context: Context,
    mixer: LatentAttentionSpec,
    own: LayerArrays,
    place: Place,
    x: jax.Array,
    pool: KvPool,
) -> tuple[jax.Array, KvPool]:
    """Mixes f32 [N, width]; the pool that is returned holds this step's keys and values."""
    own_part, shared_part = _queries(context, mixer, own, place, x)
    latent, shared_key = _latent(context, mixer, own, place, x)
    if mixer.is_absorbed:
        queries = jnp.concatenate([_by_head(context, own, "attn_k_b", own_part), shared_part], -1)
        keys = jnp.concatenate([latent[:, None], shared_key], -1)
        values = jnp.zeros((x.shape[0], 1, 0), jnp.float32)
    else:
        queries = jnp.concatenate([own_part, shared_part], -1)
        made = context.linear(own, "attn_kv_b", latent).reshape(x.shape[0], mixer.num_heads, -1)
        own_keys, values = jnp.split(made, [mixer.nope_dim], axis=-1)
        for_all = jnp.broadcast_to(shared_key, (*own_keys.shape[:2], mixer.rope_dim))
        keys = jnp.concatenate([own_keys, for_all], -1)
    mixed, pool = attend_step(
        mixer,
        pool,
        queries,
        keys,
        values,
        rows_of(context, place),
        place.window,
        num_decodes=context.num_decodes,
        is_native=context.weights.is_native,
    )
    if mixer.is_absorbed:
        mixed = mixed.reshape(-1, mixer.num_heads, mixer.latent_dim)
        mixed = _by_head(context, own, "attn_v_b", mixed).reshape(x.shape[0], -1)
    return context.linear(own, "attn_output", mixed), pool


def _queries(
    context: Context, mixer: LatentAttentionSpec, own: LayerArrays, place: Place, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each head's query for its own key part and for the shared one, rotated; f32 [N, heads, n]."""
    if mixer.query_rank:
        inner = context.norm(
            context.linear(own, "attn_q_a", x), vector(own, "attn_q_a_norm.weight")
        )
        queries = context.linear(own, "attn_q_b", inner)
    else:
        queries = context.linear(own, "attn_q", x)
    queries = queries.reshape(-1, mixer.num_heads, mixer.key_dim)
    own_part, shared_part = jnp.split(queries, [mixer.nope_dim], axis=-1)
    return own_part, _rotated(context, place, shared_part)


def _latent(
    context: Context, mixer: LatentAttentionSpec, own: LayerArrays, place: Place, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The normalised latent vector, f32 [N, latent], and the shared key, f32 [N, 1, rope]."""
    both = context.linear(own, "attn_kv_a_mqa", x)
    latent, shared_key = jnp.split(both, [mixer.latent_dim], axis=-1)
    latent = context.norm(latent, vector(own, "attn_kv_a_norm.weight"))
    return latent, _rotated(context, place, shared_key[:, None])


def _rotated(context: Context, place: Place, x: jax.Array) -> jax.Array:
    cos, sin = context.turns
    pairing = context.spec.ropes[0].pairing
    return rotate(pairing, x, cos[place.rope_id], sin[place.rope_id])


def _by_head(context: Context, own: LayerArrays, name: str, x: jax.Array) -> jax.Array:
    """Each head's vector by its own matrix of a stack: f32 [N, heads, cols] to [N, heads, rows]."""
    num, heads, _ = x.shape
    ids = jnp.tile(jnp.arange(heads, dtype=jnp.int32), num)[:, None]
    stack = cast(MatrixStack, own[name])
    (y,) = expert_products(context.weights.arena, [stack], x.reshape(num * heads, -1), ids)
    return y.reshape(num, heads, -1)
