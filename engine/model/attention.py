"""Attention over paged keys and values, on plain XLA.

Keys of all layers lie in one pool array [units, page, kv_heads, key_dim], values in another of
their own dimension, which may be 0: then they are the first components of the keys. A layer owns
a run of units; the first of them is its sink, to which padding writes. Tables hold units, so a
layer adds its own first unit to the page ids that the scheduler knows. The keys are walked in
blocks of fixed positions with a running softmax, and the number of blocks walked is data, not
shape: time follows the tokens held, one program serves every length, and how the keys are split
depends on their positions alone, never on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from engine.kernels import flow, native
from engine.model.spec import KvHeads

BLOCK_TOKENS = 256
"""Keys per block of the walk. Tables are padded to whole blocks."""

_MASKED = -1e30  # finite, so that a block without any visible key still subtracts cleanly
_NO_POSITION = np.int32(2**31 - 1)


class Scoring(Protocol):
    """What attention must know of a mixer: the score scale, the cap (0: none), and dimensions."""

    @property
    def scale(self) -> float:
        """Multiplies the scores."""
        ...

    @property
    def soft_cap(self) -> float:
        """Bounds the scores; 0 does not."""
        ...

    @property
    def kv(self) -> KvHeads:
        """What lies in the pool."""
        ...

    @property
    def mixed_dim(self) -> int:
        """Components of each head's result."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KvPool:
    """Keys and values of every attention layer, f16 or f32 [units, page, kv_heads, dim] each."""

    keys: jax.Array
    values: jax.Array

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return self.keys.shape[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Where a step's tokens lie in one layer; int32.

    `positions` [N] (-1: padding), `units` and `offsets` [N] say where each token is stored;
    `tables` [R, W] has the units of each decode row and, last, of the chunk.
    """

    positions: jax.Array
    units: jax.Array
    offsets: jax.Array
    tables: jax.Array


def attend_step(
    spec: Scoring,
    pool: KvPool,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rows: Rows,
    window: jax.Array,
    sinks: jax.Array | None = None,
    *,
    num_decodes: int,
    is_native: bool,
) -> tuple[jax.Array, KvPool]:
    """Stores a step's keys and values and attends all its tokens, in one call if native.

    Args:
        spec: The score scale, its soft-cap and the dimensions.
        pool: Keys and values.
        queries: f32 [N, num_heads, key_dim], rotated.
        keys: f32 [N, num_kv_heads, key_dim], rotated.
        values: f32 [N, num_kv_heads, value_dim].
        rows: Where they lie.
        window: int32 scalar; a query sees the last `window` tokens, itself included.
        sinks: f32 [num_heads], one more score of each head, without a value.
        num_decodes: Tokens that are rows of their own; those after them are one chunk.
        is_native: Use the native kernel.

    Returns:
        f32 [N, num_heads * mixed_dim] and the pool.
    """
    num = queries.shape[0]
    if is_native:
        mixed, *stored = native.attend(
            (pool.keys, pool.values),
            queries,
            keys,
            values,
            rows.positions,
            rows.units,
            rows.offsets,
            rows.tables,
            window,
            sinks,
            mixed_dim=spec.mixed_dim,
            num_decodes=num_decodes,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
        )
        return mixed.reshape(num, -1), KvPool(*stored)
    pool = write(pool, rows.units, rows.offsets, keys, values)
    parts: list[jax.Array] = []
    if num_decodes:
        own = queries[:num_decodes, None], rows.positions[:num_decodes, None]
        parts.append(attend(spec, pool, *own, rows.tables[:num_decodes], window, sinks)[:, 0])
    if num > num_decodes:
        own = queries[None, num_decodes:], rows.positions[None, num_decodes:]
        parts.append(attend(spec, pool, *own, rows.tables[num_decodes:], window, sinks)[0])
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0], pool


def write(
    pool: KvPool, units: jax.Array, offsets: jax.Array, keys: jax.Array, values: jax.Array
) -> KvPool:
    """Stores one token per entry: keys and values f32 [N, kv_heads, dim].

    `units` and `offsets` are int32 [N]; padding names a sink.
    """
    return KvPool(
        pool.keys.at[units, offsets].set(keys.astype(pool.keys.dtype)),
        pool.values.at[units, offsets].set(values.astype(pool.values.dtype)),
    )


def attend(
    spec: Scoring,
    pool: KvPool,
    queries: jax.Array,
    positions: jax.Array,
    tables: jax.Array,
    window: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of R rows with T queries each.

    Args:
        spec: The score scale, its soft-cap and the dimensions.
        pool: Keys and values, those of this step already written.
        queries: f32 [R, T, num_heads, key_dim], rotated.
        positions: int32 [R, T]; -1 marks padding, whose result is 0.
        tables: int32 [R, W], units in order of position; W pages are whole blocks. A page that no
            query sees may be any unit.
        window: int32 scalar; a query sees the last `window` tokens, itself included.
        sinks: f32 [num_heads], one more score of each head, without a value.

    Returns:
        f32 [R, T, num_heads * mixed_dim].
    """
    rows, num_queries, heads, dim = queries.shape
    kv_heads, mixed_dim = spec.kv.num, spec.mixed_dim
    grouped = queries.reshape(rows, num_queries, kv_heads, heads // kv_heads, dim) * spec.scale
    block_pages = BLOCK_TOKENS // pool.page_tokens
    earliest = jnp.min(jnp.where(positions < 0, _NO_POSITION, positions))
    first_block = jnp.maximum(earliest - window + 1, 0) // BLOCK_TOKENS
    end_block = jnp.max(positions) // BLOCK_TOKENS + 1

    def body(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, total, out = carry
        units = lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        shape = (rows, BLOCK_TOKENS, kv_heads, -1)
        keys = pool.keys[units].reshape(shape).astype(jnp.float32)
        if spec.kv.value_dim:
            values = pool.values[units].reshape(shape).astype(jnp.float32)
        else:
            values = keys[..., :mixed_dim]
        key_positions = i * BLOCK_TOKENS + jnp.arange(BLOCK_TOKENS, dtype=jnp.int32)
        age = positions[..., None] - key_positions  # [R, T, S]
        visible = ((age >= 0) & (age < window))[:, None, None]
        scores = jnp.einsum("rtkgd,rskd->rkgts", grouped, keys)
        if spec.soft_cap:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        scores = jnp.where(visible, scores, _MASKED)
        new_best = jnp.maximum(best, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_best[..., None]), 0.0)
        fade = jnp.exp(best - new_best)
        total = total * fade + weights.sum(-1)
        # A unit that no query sees may hold anything, and 0 * NaN is NaN.
        seen = visible.any((1, 2, 3))[..., None, None]
        values = jnp.where(seen, values, 0.0)
        out = out * fade[..., None] + jnp.einsum("rkgts,rskd->rkgtd", weights, values)
        return new_best, total, out

    lead = (rows, kv_heads, heads // kv_heads, num_queries)
    if sinks is None:
        best, total = jnp.full(lead, _MASKED, jnp.float32), jnp.zeros(lead, jnp.float32)
    else:  # a score that has been seen, with a weight of 1 so far and no value
        by_group = sinks.reshape(1, kv_heads, -1, 1)
        best, total = jnp.broadcast_to(by_group, lead), jnp.ones(lead, jnp.float32)
    start = best, total, jnp.zeros((*lead, mixed_dim), jnp.float32)
    _, total, out = flow.fori_loop(first_block, end_block, body, start)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(rows, num_queries, heads * mixed_dim)
