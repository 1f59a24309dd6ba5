"""Rows brought together by the expert that they go to, so that each expert is read once.

On plain XLA shapes are static and how many rows an expert gets is not. So the rows of an expert
fill blocks of a fixed number of rows, the last one padded, and a loop runs over as many blocks as
there are: its work follows the rows, its program knows neither experts nor rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

_MAX_BLOCK_ROWS = 64


@dataclass(frozen=True)
class Grouping:
    """Where P pairs of a row and an expert lie in blocks of `block_rows` rows.

    `places` int32 [P] is each pair's row among the blocks, `block_expert` int32 [blocks] whose
    block it is, `num_blocks` a scalar: those past it hold nothing.
    """

    places: jax.Array
    block_expert: jax.Array
    num_blocks: jax.Array
    block_rows: int

    def gather(self, x: jax.Array) -> jax.Array:
        """Puts f32 [P, n] into blocks, [blocks * block_rows, n]; padding is 0."""
        num_rows = self.block_expert.shape[0] * self.block_rows
        return jnp.zeros((num_rows, x.shape[1]), x.dtype).at[self.places].set(x)

    def scatter(self, y: jax.Array) -> jax.Array:
        """The inverse of `gather`."""
        return y[self.places]


def group(ids: jax.Array, count: int) -> Grouping:
    """Groups pairs by expert; `ids` int32 [P] are those of the pairs, out of `count`."""
    num_pairs = ids.shape[0]
    size = _block_rows(num_pairs, count)
    counts = jnp.zeros(count, jnp.int32).at[ids].add(1)
    ends = jnp.cumsum(-(-counts // size))  # in blocks
    starts = ends - (-(-counts // size))
    order = jnp.argsort(ids, stable=True)
    before = jnp.cumsum(counts) - counts
    rank = jnp.zeros(num_pairs, jnp.int32).at[order].set(jnp.arange(num_pairs, dtype=jnp.int32))
    places = starts[ids] * size + rank - before[ids]
    most = num_pairs // size + min(count, num_pairs)
    blocks = jnp.arange(most, dtype=jnp.int32)
    block_expert = jnp.minimum(jnp.searchsorted(ends, blocks, side="right"), count - 1)
    return Grouping(places, block_expert.astype(jnp.int32), ends[-1], size)


def _block_rows(num_pairs: int, count: int) -> int:
    """About the rows that an expert gets; a product with one row is a slow loop on XLA."""
    size = 2
    while size < min(_MAX_BLOCK_ROWS, num_pairs // count):
        size *= 2
    return size
