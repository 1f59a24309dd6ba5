"""Low-rank changes of a product: any mix of adapters and scales over the rows of one step.

The pairs of all loaded adapters lie in one bank per weight, by place, so that loading and choosing
adapters is data and compiles nothing. A row lists its adapters with their scales; what it does not
list costs it nothing in the native kernel and is exactly zero on XLA. The native kernel computes
each row by itself, its adapters in the order of its list, so that a row's bits do not depend on
the rows beside it. Knows no file and no model.

Source: Hu et al. 2021 (LoRA); Chen et al. 2023 (Punica), whose gather becomes two dense products
over all places on XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels.native import lora as native


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdapterLists:
    """Which adapters each row of a step runs with.

    `places` int32 [R, n], -1 for none; `scales` f32 [R, n]. No place is twice in a row.
    """

    places: jax.Array
    scales: jax.Array

    def by_token(self, num_tokens: int, num_decodes: int) -> AdapterLists:
        """One list per token, of one per decode row and one for all tokens after those."""
        rows = jnp.minimum(jnp.arange(num_tokens), num_decodes)
        return AdapterLists(self.places[rows], self.scales[rows])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["down", "up", "entries", "factors"],
    meta_fields=["rows", "cols", "rank", "is_native", "count"],
)
@dataclass(frozen=True)
class Bank:
    """The pairs of L weights of one shape, for n places of at most `rank`.

    `down` [L, n, rank * cols] and `up` [L, n, rank * rows], of a token embedding [L, n, rows * rank]
    and [L, n, rank * cols]: f32, padded with zeros up to `rank`; for the native kernel uint32 words
    that hold the pair in its own precision, without padding between. `entries` int32 [L, n] are
    `4 * rank + number` of each pair (f32, f16, bf16), 0 where a place changes nothing; `factors` f32
    [L, n] multiply the scales.

    Of stacks of `count` experts there is a pair per expert: n is then places times experts, the
    experts of a place side by side.
    """

    down: jax.Array
    up: jax.Array
    entries: jax.Array
    factors: jax.Array
    rows: int
    cols: int
    rank: int
    is_native: bool = False
    count: int = 1

    @property
    def num_places(self) -> int:
        """How many adapters there is room for."""
        return self.down.shape[1] // self.count

    @property
    def arrays(self) -> native.BankArrays:
        """Down, up, entries and factors."""
        return self.down, self.up, self.entries, self.factors


@dataclass(frozen=True)
class Changes:
    """What a step's adapters change of products of one input.

    `banks` are of each product's weight, None where adapters cannot change it, `layer` says which
    of their L weights; `lists` has one list per decode row, then one for all tokens after those;
    `num_decodes` tokens are rows of their own.
    """

    banks: Sequence[Bank | None]
    layer: jax.Array | int
    lists: AdapterLists
    num_decodes: int

    @property
    def is_native(self) -> bool:
        """Whether the native kernels read the banks."""
        return all(bank is None or bank.is_native for bank in self.banks)

    @property
    def arrays(self) -> native.Changes:
        """As the native kernels take them."""
        banks = [(i, bank.arrays) for i, bank in enumerate(self.banks) if bank is not None]
        pair = self.lists.places, self.lists.scales
        return native.Changes(banks, self.layer, pair, self.num_decodes)


def adapt(changes: Changes, x: jax.Array, products: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds changes to products on XLA; `qmatmuls` of native matrices does so by itself.

    Args:
        changes: What is added, in banks that are not native.
        x: f32 [N, cols], the input of the products.
        products: f32 [N, rows] each.

    Returns:
        f32 [N, rows] each.
    """
    if all(bank is None for bank in changes.banks):
        return list(products)
    scales = dense_scales(changes.lists, x.shape[0], changes.num_decodes)
    return [
        y if bank is None else y + _change(bank, changes.layer, scales, x)
        for bank, y in zip(changes.banks, products, strict=True)
    ]


def adapt_embedding(
    bank: Bank, lists: AdapterLists, tokens: jax.Array, x: jax.Array, *, num_decodes: int
) -> jax.Array:
    """Adds what the adapters change to embeddings f32 [N, cols] of `tokens`, int32 [N]."""
    if bank.is_native:
        pair = (lists.places, lists.scales)
        return native.adapt_embedding(
            bank.arrays, pair, tokens, x, vocabulary=bank.rows, num_decodes=num_decodes
        )
    scales = dense_scales(lists, x.shape[0], num_decodes) * bank.factors[0]
    shape = (bank.num_places, bank.rows, bank.rank)
    inner = bank.down[0].reshape(shape)[:, tokens].swapaxes(0, 1)
    return x + expand(scales, inner, bank.up[0].reshape(-1, bank.cols))


def dense_scales(lists: AdapterLists, num_tokens: int, num_decodes: int) -> jax.Array:
    """The scale of every place for every token, f32 [N, n]."""
    num_rows, num_places = lists.places.shape
    # Empty entries go to a column that is cut off.
    columns = jnp.where(lists.places < 0, num_places, lists.places)
    dense = jnp.zeros((num_rows, num_places + 1), jnp.float32)
    dense = dense.at[jnp.arange(num_rows)[:, None], columns].add(lists.scales)[:, :num_places]
    if num_tokens == num_rows:
        return dense
    rest = jnp.broadcast_to(dense[num_decodes], (num_tokens - num_decodes, num_places))
    return jnp.concatenate([dense[:num_decodes], rest])


def _change(bank: Bank, layer: jax.Array | int, scales: jax.Array, x: jax.Array) -> jax.Array:
    def own(stacked: jax.Array) -> jax.Array:
        return cast(jax.Array, lax.dynamic_index_in_dim(stacked, layer, keepdims=False))

    inner = x @ own(bank.down).reshape(-1, bank.cols).T
    inner = inner.reshape(x.shape[0], bank.num_places, bank.rank)
    return expand(scales * own(bank.factors), inner, own(bank.up).reshape(-1, bank.rows))


def expand(scales: jax.Array, inner: jax.Array, up: jax.Array) -> jax.Array:
    """`inner` f32 [N, n, rank], scaled by place, times `up` f32 [n * rank, width]."""
    # A place that is off is zero even where what lies in it overflows.
    scaled = jnp.where(scales[..., None] != 0, inner * scales[..., None], 0.0)
    flat: jax.Array = scaled.reshape(inner.shape[0], -1)
    return flat @ up
