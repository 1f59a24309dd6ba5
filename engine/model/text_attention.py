"""Attention of whole texts to themselves, on plain XLA: every token sees all of its text.

Tokens of several texts lie one after another. For the scores they are put into blocks of fixed
length, none of which has tokens of two texts, so a block of queries walks the blocks of its own
text alone, in their order: what a text's tokens become does not depend on the texts beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from engine.kernels import flow
from engine.model.attention import Scoring

TEXT_BLOCK = 32
"""Tokens per block."""

_MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TextBlocks:
    """How N tokens lie in B blocks; int32.

    `sources` [B, TEXT_BLOCK] has the token of each place of a block, N where there is none,
    `places` [N] the place of each token. `first` and `count` [B] are the blocks of a block's text;
    blocks without tokens have a count of 0.
    """

    sources: jax.Array
    places: jax.Array
    first: jax.Array
    count: jax.Array


def attend_texts(
    spec: Scoring, queries: jax.Array, keys: jax.Array, values: jax.Array, blocks: TextBlocks
) -> jax.Array:
    """Returns f32 [N, heads * dim] for queries f32 [N, heads, dim], keys and values with kv_heads.

    A walk over the keys with a running softmax, so memory does not grow with the square of a text.

    Source: Milakov and Gimelshein 2018 (online softmax).
    """
    num, num_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]

    def in_blocks(x: jax.Array) -> jax.Array:
        return x.at[blocks.sources].get(mode="fill", fill_value=0.0)

    # [B, kv_heads, group, T, dim], and [B, kv_heads, T, dim].
    shape = (-1, TEXT_BLOCK, num_kv_heads, num_heads // num_kv_heads, dim)
    own = (in_blocks(queries) * spec.scale).reshape(shape).transpose(0, 2, 3, 1, 4)
    all_keys, all_values = (in_blocks(x).transpose(0, 2, 1, 3) for x in (keys, values))
    is_token = blocks.sources < num

    def walk(
        i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        most, total, mixed = carry
        other = blocks.first + jnp.clip(i, 0, jnp.maximum(blocks.count - 1, 0))
        seen = (is_token[other] & (i < blocks.count)[:, None])[:, None, None, None, :]
        scores = jnp.einsum("bkgtd,bksd->bkgts", own, all_keys[other])
        scores = jnp.where(seen, scores, _MASKED)
        greatest = jnp.maximum(most, scores.max(-1, keepdims=True))
        shares = jnp.exp(scores - greatest) * seen
        kept = jnp.exp(most - greatest)
        total = total * kept + shares.sum(-1, keepdims=True)
        mixed = mixed * kept + jnp.einsum("bkgts,bksd->bkgtd", shares, all_values[other])
        return greatest, total, mixed

    lead = own.shape[:-1]
    start = jnp.full((*lead, 1), _MASKED), jnp.zeros((*lead, 1)), jnp.zeros((*lead, dim))
    _, total, mixed = flow.fori_loop(0, blocks.count.max(), walk, start)
    mixed = mixed / jnp.where(total > 0, total, 1.0)
    flat = mixed.transpose(0, 3, 1, 2, 4).reshape(-1, num_heads * dim)
    return flat[blocks.places]
