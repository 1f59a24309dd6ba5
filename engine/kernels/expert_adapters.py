"""Low-rank changes of products with experts: each row through the pairs of the expert that it took.

Natively a pair of a row and its expert is a row of its own, whose adapters are found at the
expert's place in the bank, so that its bits depend on nothing beside it. On XLA rows are brought
together by expert, as in the products themselves. It knows experts by their number in the model and
not where their weights are.

Source: llama.cpp's llm_graph_context::build_lora_mm_id.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from engine.kernels import expert_groups, flow
from engine.kernels.lora import AdapterLists, Bank, dense_scales, expand
from engine.kernels.native import lora as native


def adapt_experts(
    banks: Sequence[Bank | None],
    layer: jax.Array | int,
    lists: AdapterLists,
    x: jax.Array,
    ids: jax.Array,
    products: Sequence[jax.Array],
) -> list[jax.Array]:
    """Adds what the adapters change to products of one input with experts.

    Args:
        banks: The bank of each product's stack, None where adapters cannot change it.
        layer: Which of the L stacks.
        lists: One per token.
        x: f32 [M, cols], M a multiple of the tokens, in their order.
        ids: int32 [M, K], the experts of each row, in range.
        products: f32 [M, K, rows] each.

    Returns:
        f32 [M, K, rows] each.
    """
    changed = list(products)
    chosen = [(i, bank) for i, bank in enumerate(banks) if bank is not None]
    if not chosen:
        return changed
    used = ids.shape[1]
    # From here on a row is a pair of an input and an expert.
    own = _repeated(lists, ids.size // lists.places.shape[0])
    inputs, experts = jnp.repeat(x, used, axis=0), ids.reshape(-1)
    flat = [changed[i].reshape(ids.size, -1) for i, _ in chosen]
    if all(bank.is_native for _, bank in chosen):
        sums = _native(chosen, layer, own, inputs, experts, flat)
    else:
        sums = _grouped(chosen, layer, own, inputs, experts, flat)
    for (i, _), y in zip(chosen, sums, strict=True):
        changed[i] = y.reshape(changed[i].shape)
    return changed


def _repeated(lists: AdapterLists, times: int) -> AdapterLists:
    return AdapterLists(
        jnp.repeat(lists.places, times, axis=0), jnp.repeat(lists.scales, times, axis=0)
    )


def _native(
    chosen: Sequence[tuple[int, Bank]],
    layer: jax.Array | int,
    lists: AdapterLists,
    x: jax.Array,
    experts: jax.Array,
    products: Sequence[jax.Array],
) -> list[jax.Array]:
    """Every pair as a decode row with places of its own."""
    count = chosen[0][1].count
    places = jnp.where(lists.places < 0, -1, lists.places * count + experts[:, None])
    arrays = [bank.arrays for _, bank in chosen]
    pair = places.astype(jnp.int32), lists.scales
    return native.adapt(arrays, layer, pair, x, products, num_decodes=x.shape[0])


def _grouped(
    chosen: Sequence[tuple[int, Bank]],
    layer: jax.Array | int,
    lists: AdapterLists,
    x: jax.Array,
    experts: jax.Array,
    products: Sequence[jax.Array],
) -> list[jax.Array]:
    """Pairs by expert, in blocks of rows that share one."""
    grouping = expert_groups.group(experts, chosen[0][1].count)
    rows = grouping.gather(x)
    scales = grouping.gather(dense_scales(lists, x.shape[0], x.shape[0]))
    changes = [_changes(bank, layer, grouping, rows, scales) for _, bank in chosen]
    return [y + grouping.scatter(change) for y, change in zip(products, changes, strict=True)]


def _changes(
    bank: Bank,
    layer: jax.Array | int,
    grouping: expert_groups.Grouping,
    x: jax.Array,
    scales: jax.Array,
) -> jax.Array:
    """What is added to the products of rows in `grouping`'s order, f32 [rows of it, rows]."""
    size, places = grouping.block_rows, bank.num_places

    def of_expert(array: jax.Array, expert: jax.Array) -> jax.Array:
        """One expert of all places, [n, ...]."""
        stacked = array.reshape(array.shape[0], places, bank.count, -1)
        return lax.dynamic_slice(stacked, (layer, 0, expert, 0), (1, places, 1, stacked.shape[-1]))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = grouping.block_expert[i]
        own = lax.dynamic_slice_in_dim(x, i * size, size)
        factors = of_expert(bank.factors, expert).reshape(-1)
        weights = lax.dynamic_slice_in_dim(scales, i * size, size) * factors
        inner = own @ of_expert(bank.down, expert).reshape(-1, bank.cols).T
        inner = inner.reshape(size, places, bank.rank)
        up = of_expert(bank.up, expert).reshape(-1, bank.rows)
        change = expand(weights, inner, up)
        return lax.dynamic_update_slice_in_dim(out, change, i * size, axis=0)

    start = jnp.zeros((x.shape[0], bank.rows), jnp.float32)
    return flow.fori_loop(0, grouping.num_blocks, body, start)
