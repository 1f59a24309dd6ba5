"""The low-rank kernels as jax sees them; see `engine.kernels.lora` for what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# Down, up, entries and factors of a bank, see `engine.kernels.lora.Bank`.
BankArrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# Places and scales of every row.
Lists = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Changes:
    """What adapters add to products of one input: banks by the number of their matrix."""

    banks: Sequence[tuple[int, BankArrays]]
    layer: jax.Array | int
    lists: Lists
    num_decodes: int


def adapt(
    banks: Sequence[BankArrays],
    layer: jax.Array | int,
    lists: Lists,
    x: jax.Array,
    products: Sequence[jax.Array],
    *,
    num_decodes: int,
) -> list[jax.Array]:
    """Adds to f32 products [N, rows] of one input f32 [N, cols], in place."""
    given: list[jax.Array] = [*lists, jnp.asarray(layer, jnp.int32), x]
    aliases: dict[int, int] = {}
    for index, (bank, y) in enumerate(zip(banks, products, strict=True)):
        given += [*bank, y]
        aliases[len(given) - 1] = index
    results = [jax.ShapeDtypeStruct(y.shape, jnp.float32) for y in products]
    call = jax.ffi.ffi_call("kvarts_adapt", results, input_output_aliases=aliases)
    return list(call(*given, num_decodes=np.int64(num_decodes)))


def adapt_embedding(
    bank: BankArrays,
    lists: Lists,
    tokens: jax.Array,
    x: jax.Array,
    *,
    vocabulary: int,
    num_decodes: int,
) -> jax.Array:
    """Adds to f32 embeddings [N, width] of int32 tokens [N], in place."""
    given = [*lists, tokens, *bank, x]
    result = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    aliases = {len(given) - 1: 0}
    call = jax.ffi.ffi_call("kvarts_adapt_embedding", result, input_output_aliases=aliases)
    return call(*given, vocabulary=np.int64(vocabulary), num_decodes=np.int64(num_decodes))
