"""Paged attention against a plain softmax in float64, over pools in which all else is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from engine.model.attention import BLOCK_TOKENS, KvPool, attend, write
from engine.model.spec import AttentionSpec
from tests.unit.engine.jitted import jitted

SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=4, scale=0.5)
UNLIMITED = 2**30
TABLE_TOKENS = 3 * BLOCK_TOKENS

Array = npt.NDArray[Any]

# Two programs of each page size for the whole module: static is only what a spec holds.
run = {spec: jitted(partial(attend, spec)) for spec in (SPEC, replace(SPEC, soft_cap=2.0))}


@dataclass(frozen=True)
class Sequences:
    """Rows with keys and values at positions 0 .. length - 1, and a pool that pages them."""

    keys: list[Array]
    values: list[Array]
    pool: KvPool
    tables: npt.NDArray[np.int32]


def make(lengths: Sequence[int], page: int, dtype: str = "f4", seed: int = 0) -> Sequences:
    """Pages lie in random order; what no row holds, the sink included, is NaN."""
    rng = np.random.default_rng(seed)
    shape = (SPEC.num_kv_heads, SPEC.head_dim)
    keys: list[Array] = [
        rng.standard_normal((n, *shape), np.float32).astype(dtype) for n in lengths
    ]
    values: list[Array] = [
        rng.standard_normal((n, *shape), np.float32).astype(dtype) for n in lengths
    ]
    num_units = 1 + sum(-(-n // page) for n in lengths) + 3
    units = list(rng.permutation(np.arange(1, num_units)))
    pool: Array = np.full((2, num_units, page, *shape), np.nan, dtype)
    tables = np.zeros((len(lengths), TABLE_TOKENS // page), np.int32)
    for row, length in enumerate(lengths):
        for position in range(length):
            if position % page == 0:
                tables[row, position // page] = units.pop()
            unit = tables[row, position // page]
            pool[0, unit, position % page] = keys[row][position]
            pool[1, unit, position % page] = values[row][position]
    return Sequences(keys, values, KvPool(jnp.asarray(pool[0]), jnp.asarray(pool[1])), tables)


def reference(
    spec: AttentionSpec, sequences: Sequences, row: int, query: Array, position: int, window: int
) -> npt.NDArray[np.float64]:
    """One query, f32 [num_heads, head_dim], by the definition."""
    if position < 0:
        return np.zeros(spec.num_heads * spec.head_dim)
    first = max(0, position - window + 1)
    out: list[npt.NDArray[np.float64]] = []
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        keys = sequences.keys[row][first : position + 1, kv_head].astype(np.float64)
        values = sequences.values[row][first : position + 1, kv_head].astype(np.float64)
        scores = keys @ query[head].astype(np.float64) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        weights = np.exp(scores - scores.max())
        out.append(weights @ values / weights.sum())
    return np.concatenate(out)


def assert_attends(
    sequences: Sequences,
    positions: npt.NDArray[np.int32],
    *,
    spec: AttentionSpec = SPEC,
    window: int = UNLIMITED,
) -> None:
    shape = (*positions.shape, spec.num_heads, spec.head_dim)
    queries = np.random.default_rng(9).standard_normal(shape, np.float32)
    result = np.asarray(
        run[spec](
            sequences.pool,
            jnp.asarray(queries),
            jnp.asarray(positions),
            jnp.asarray(sequences.tables),
            jnp.int32(window),
        )
    )
    for row, query in np.ndindex(*positions.shape):
        expected = reference(
            spec, sequences, row, queries[row, query], int(positions[row, query]), window
        )
        np.testing.assert_allclose(result[row, query], expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("page", "dtype"),
    [(16, "f2"), (32, "f4"), (32, "f2"), (64, "f4")],
)
def test_rows_of_any_length_attend_to_their_own_pages(page: int, dtype: str) -> None:
    # Around each end of a block, with a padding row among them and one of a single token.
    lengths = [BLOCK_TOKENS - 1, 1, BLOCK_TOKENS, 0, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 7]
    positions = np.array([[n - 1] for n in lengths], np.int32)
    assert_attends(make(lengths, page, dtype), positions)


@pytest.mark.parametrize("start", [0, BLOCK_TOKENS - 3, BLOCK_TOKENS, 2 * BLOCK_TOKENS - 8])
def test_each_token_of_a_chunk_sees_what_came_before_it(start: int) -> None:
    # The last two of eight queries are padding.
    positions = np.array([[*range(start, start + 6), -1, -1]], np.int32)
    assert_attends(make([start + 6], page=16), positions)


@pytest.mark.parametrize("window", [1, 5, 16, BLOCK_TOKENS, BLOCK_TOKENS + 40])
def test_a_window_hides_older_tokens(window: int) -> None:
    lengths = [3, BLOCK_TOKENS + 2, 2 * BLOCK_TOKENS + 30]
    sequences = make(lengths, page=16)
    # Pages behind the window may hold anything, and so may their table entries.
    for row, length in enumerate(lengths):
        gone = max(0, length - window) // 16
        sequences.tables[row, :gone] = 0
    assert_attends(sequences, np.array([[n - 1] for n in lengths], np.int32), window=window)


def test_a_step_of_padding_alone_is_zero() -> None:
    sequences = make([4, 4], page=16)
    assert_attends(sequences, np.full((2, 1), -1, np.int32))


def test_scores_are_capped_softly() -> None:
    positions = np.array([[3], [BLOCK_TOKENS]], np.int32)
    assert_attends(make([4, BLOCK_TOKENS + 1], 16), positions, spec=replace(SPEC, soft_cap=2.0))


def test_scores_of_any_size_stay_finite() -> None:
    sequences = make([300], page=16)
    pool = KvPool(sequences.pool.keys * 3e4, sequences.pool.values)
    keys = [row * np.float32(3e4) for row in sequences.keys]
    assert_attends(replace(sequences, keys=keys, pool=pool), np.array([[299]], np.int32))


def test_a_row_attends_alike_alone_and_in_company() -> None:
    crowd = make([40, 700, 1, 300], page=16)
    queries = jnp.asarray(np.random.default_rng(3).standard_normal((4, 1, 6, 4), np.float32))
    positions = jnp.array([[39], [699], [0], [299]], jnp.int32)
    tables, window = jnp.asarray(crowd.tables), jnp.int32(UNLIMITED)
    together = np.asarray(run[SPEC](crowd.pool, queries, positions, tables, window))
    alone = [
        np.asarray(
            run[SPEC](
                crowd.pool, queries[i : i + 1], positions[i : i + 1], tables[i : i + 1], window
            )
        )
        for i in range(4)
    ]
    np.testing.assert_allclose(np.concatenate(alone), together, rtol=0, atol=1e-6)


def test_writing_stores_each_token_at_its_place_and_nowhere_else() -> None:
    shape = (4, 16, 2, 4)
    pool = KvPool(jnp.zeros(shape, jnp.float16), jnp.zeros(shape, jnp.float16))
    rng = np.random.default_rng(0)
    keys, values = (jnp.asarray(rng.standard_normal((3, 2, 4), np.float32)) for _ in range(2))
    units, offsets = jnp.array([3, 1, 0], jnp.int32), jnp.array([15, 0, 7], jnp.int32)
    written = jitted(write)(pool, units, offsets, keys, values)
    for stored, given in ((written.keys, keys), (written.values, values)):
        expected = np.zeros(shape, np.float16)
        expected[[3, 1, 0], [15, 0, 7]] = np.asarray(given).astype(np.float16)
        np.testing.assert_array_equal(np.asarray(stored), expected)
