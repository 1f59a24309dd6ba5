"""The native kernels as jax sees them: a C++ library behind XLA's foreign function interface.

The library is built beside this file when the package is installed where a compiler is; without it
`isa` returns None and everything runs on `engine.kernels.xla`. Loading it registers its functions
with jax, once per process, which is jax's own global table.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from engine.gguf.layouts import Layout
from engine.kernels.native.lora import Changes

LIBRARY = Path(__file__).parent / "libkvarts_kernels.so"

_TARGETS = (
    "kvarts_qmatmul",
    "kvarts_gather",
    "kvarts_norm",
    "kvarts_log_sum_exp",
    "kvarts_expert_products",
    "kvarts_cached_products",
    "kvarts_ensure_experts",
    "kvarts_route",
    "kvarts_attend_f16",
    "kvarts_attend_f32",
    "kvarts_adapt",
    "kvarts_adapt_embedding",
    "kvarts_convolve",
    "kvarts_recur",
)
# Numbers of kernels.h.
_KINDS = {"dense": 0, "q8": 1, "q4": 2, "iq4": 3, "mx4": 4}
_NUMBERS = {"f32": 0, "f16": 1, "bf16": 2, "f16x8": 3, "e8": 4}
_GATINGS = {"softmax": 0, "sigmoid": 1, "chosen_softmax": 2}


def isa() -> str | None:
    """Returns the instruction set that the library chose, None if it is not in use."""
    return _loaded()[0]


def why_missing() -> str:
    """Returns why the library is not in use, as the end of a sentence about it; "" if it is."""
    return _loaded()[1]


@functools.cache
def _loaded() -> tuple[str | None, str]:
    """Loads the library, once: its instruction set, or why there is none."""
    if not LIBRARY.is_file():
        return None, "were not built (no C++ compiler at installation?)"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name in _TARGETS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except (OSError, AttributeError, ValueError, RuntimeError) as error:
        # Built for another machine or another version of these sources.
        return None, f"cannot be loaded ({error})"
    library.kvarts_isa.restype = ctypes.c_char_p
    return cast(bytes, library.kvarts_isa()).decode(), ""


def qmatmul(
    arena: jax.Array,
    table: jax.Array,
    x: jax.Array,
    rows: Sequence[int],
    layouts: Sequence[Layout],
    *,
    live: jax.Array | None = None,
    is_fine: bool = False,
    changes: Changes | None = None,
) -> jax.Array:
    """Returns `x @ W.T` of several matrices side by side, f32 [N, sum(rows)].

    `table` is int32 [matrices, 4]: index into `layouts`, blocks of codes, scales and offsets. Rows
    with a negative number in `live`, int32 [N], are padding: they cost nothing and become 0.
    `changes` are added in the same call.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], sum(rows)), jnp.float32)
    call = jax.ffi.ffi_call("kvarts_qmatmul", result)
    given = [arena, table, x, jnp.zeros(0, jnp.int32) if live is None else live]
    adapted: list[int] = []
    if changes is not None and changes.banks:
        adapted = [matrix for matrix, _ in changes.banks]
        given += [*changes.lists, jnp.asarray(changes.layer, jnp.int32)]
        given += [array for _, bank in changes.banks for array in bank]
    return call(
        *given,
        rows=np.array(rows, np.int64),
        layouts=described(layouts),
        is_fine=is_fine,
        adapted=np.array(adapted, np.int64),
        num_decodes=np.int64(changes.num_decodes if changes else 0),
    )


def gather_rows(
    arena: jax.Array, entry: jax.Array, row_ids: jax.Array, cols: int, layouts: Sequence[Layout]
) -> jax.Array:
    """Returns rows of one matrix decoded to f32 [N, cols]; `entry` is a row of such a table."""
    result = jax.ShapeDtypeStruct((row_ids.shape[0], cols), jnp.float32)
    call = jax.ffi.ffi_call("kvarts_gather", result)
    return call(arena, entry, row_ids, layouts=described(layouts))


def norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Returns the root-mean-square norm of f32 [..., n] over its last axis; `weight` is f32 [n].

    XLA's own sum over a row takes another order when the number of rows changes.
    """
    call = jax.ffi.ffi_call("kvarts_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, weight, epsilon=np.float32(epsilon))


def log_sum_exp(x: jax.Array) -> jax.Array:
    """Returns log(sum(exp(x))) of each row of f32 [N, n], as f32 [N].

    XLA's own sum over a row takes another order when the number of rows changes.
    """
    result = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    return jax.ffi.ffi_call("kvarts_log_sum_exp", result)(x)


def attend(
    pool: tuple[jax.Array, jax.Array],
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    units: jax.Array,
    offsets: jax.Array,
    tables: jax.Array,
    window: jax.Array,
    sinks: jax.Array | None,
    *,
    mixed_dim: int,
    num_decodes: int,
    scale: float,
    soft_cap: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stores a step's keys and values in the pool, in place, and attends all its tokens.

    Args:
        pool: Keys and values, f16 or f32 [units, page, kv_heads, dim]; donated. With values of no
            dimension the first `mixed_dim` components of the keys are the values.
        queries: f32 [N, heads, key_dim], rotated.
        keys: f32 [N, kv_heads, key_dim], rotated.
        values: f32 [N, kv_heads, value_dim].
        positions: int32 [N], -1 for padding, whose result is 0.
        units: int32 [N], where each token is stored.
        offsets: int32 [N], its place in that page.
        tables: int32 [R, W]: of each decode row, then of the chunk.
        window: int32 scalar, how many tokens a query sees.
        sinks: f32 [heads], one more score of each head, without a value.
        mixed_dim: Components of a head's result.
        num_decodes: Tokens before the chunk.
        scale: Multiplies the scores.
        soft_cap: Bounds them, if above 0.

    Returns:
        f32 [N, heads, mixed_dim] and the pool.
    """
    target = "kvarts_attend_f16" if pool[0].dtype == jnp.float16 else "kvarts_attend_f32"
    mixed_shape = jax.ShapeDtypeStruct((*queries.shape[:2], mixed_dim), jnp.float32)
    results = [mixed_shape, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in pool)]
    call = jax.ffi.ffi_call(target, results, input_output_aliases={9: 1, 10: 2})
    mixed, pool_keys, pool_values = call(
        queries,
        keys,
        values,
        positions,
        units,
        offsets,
        tables,
        window,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks,
        *pool,
        num_decodes=np.int64(num_decodes),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap),
    )
    return mixed, pool_keys, pool_values


def expert_products(
    arena: jax.Array,
    table: jax.Array,
    x: jax.Array,
    ids: jax.Array,
    rows: Sequence[int],
    layouts: Sequence[Layout],
    count: int,
) -> jax.Array:
    """Returns the product of each row with matrices of its own, f32 [N * K, sum(rows)].

    Args:
        arena: uint8 [blocks, 64].
        table: int32 [stacks, 5]: index into `layouts`, blocks of codes, scales and offsets of the
            first matrix, and the blocks from one matrix to the next.
        x: f32 [N, cols].
        ids: int32 [N, K]: row n is multiplied by matrices ids[n] of each stack.
        rows: Of a matrix of each stack.
        layouts: Those that the stacks may have.
        count: Matrices in each stack.
    """
    result = jax.ShapeDtypeStruct((ids.size, sum(rows)), jnp.float32)
    call = jax.ffi.ffi_call("kvarts_expert_products", result)
    attributes = {"rows": np.array(rows, np.int64), "layouts": described(layouts)}
    return call(arena, table, x, ids, **attributes, count=np.int64(count))


def route(
    logits: jax.Array,
    bias: jax.Array | None,
    *,
    num_used: int,
    gating: str,
    normalises: bool,
    scale: float,
    num_groups: int,
    num_groups_used: int,
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts: ids int32 [N, num_used] and weights f32 [N, num_used], the best first.

    Args:
        logits: f32 [N, experts].
        bias: f32 [experts], added to the scores for the choice alone.
        num_used: Experts per row.
        gating: Of scores: "softmax", "sigmoid", or "chosen_softmax" (of the chosen logits).
        normalises: Divide the weights by their sum, which counts as 2^-14 at least.
        scale: Multiplies the weights.
        num_groups: Groups of neighbouring experts.
        num_groups_used: The groups, by the sum of their two best, that experts come from.
    """
    shape = (logits.shape[0], num_used)
    results = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    ids, weights = jax.ffi.ffi_call("kvarts_route", results)(
        logits,
        jnp.zeros(0, jnp.float32) if bias is None else bias,
        gating=np.int64(_GATINGS[gating]),
        normalises=np.int64(normalises),
        scale=np.float32(scale),
        num_groups=np.int64(num_groups),
        num_groups_used=np.int64(num_groups_used),
    )
    return ids, weights


def convolve(
    states: jax.Array,
    x: jax.Array,
    kernel: jax.Array,
    positions: jax.Array,
    units: jax.Array,
    *,
    num_decodes: int,
) -> tuple[jax.Array, jax.Array]:
    """Convolves each channel with its last inputs, which lie in the row's state.

    Args:
        states: f32 [units, taps - 1, channels], oldest first; donated.
        x: f32 [N, channels].
        kernel: f32 [channels, taps].
        positions: int32 [N], -1 for padding, whose result is 0; a row that begins at 0 starts from
            zeros.
        units: int32 [R], the state of each row.
        num_decodes: Tokens that are rows of their own; those after them are one row.

    Returns:
        f32 [N, channels] and the states.
    """
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (x, states)]
    call = jax.ffi.ffi_call("kvarts_convolve", results, input_output_aliases={4: 1})
    mixed, states = call(x, kernel, positions, units, states, num_decodes=np.int64(num_decodes))
    return mixed, states


def recur(
    states: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    decays: jax.Array,
    strengths: jax.Array | None,
    positions: jax.Array,
    units: jax.Array,
    *,
    num_decodes: int,
    is_interleaved: bool,
) -> tuple[jax.Array, jax.Array]:
    """Carries one matrix per head on, token by token: `S = a S + k u^T`, `y = S^T q`.

    Args:
        states: f32 [units, heads, keys, values]; donated.
        queries: f32 [N, groups, keys].
        keys: f32 [N, groups, keys].
        values: f32 [N, heads, values].
        decays: f32 [N, heads], the factors a.
        strengths: f32 [N, heads]: u is `b (v - a S^T k)`, a delta net's. None: u is v.
        positions: See `convolve`.
        units: See `convolve`.
        num_decodes: See `convolve`.
        is_interleaved: Heads that share a group are neighbours, else they are `groups` apart.

    Returns:
        f32 [N, heads, values] and the states.
    """
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (values, states)]
    call = jax.ffi.ffi_call("kvarts_recur", results, input_output_aliases={7: 1})
    mixed, states = call(
        queries,
        keys,
        values,
        decays,
        decays if strengths is None else strengths,
        positions,
        units,
        states,
        num_decodes=np.int64(num_decodes),
        is_delta=strengths is not None,
        is_interleaved=is_interleaved,
    )
    return mixed, states


def described(layouts: Sequence[Layout]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """(kind, number, group, has offset, bound of codes) of each layout, flat, as kernels read it."""
    numbers = [
        (
            _KINDS[layout.kind],
            _NUMBERS[layout.dtype or layout.scale_dtype or "f32"],
            layout.group or 0,
            int(layout.has_offset),
            layout.code_bound,
        )
        for layout in layouts
    ]
    return np.array(numbers, np.int64).ravel()
