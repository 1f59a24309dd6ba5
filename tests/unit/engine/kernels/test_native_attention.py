"""Native attention against a plain softmax in float64, and what it refuses.

Every unit that a step does not name is NaN, so that one read too many shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.kernels.paged_attention import (
    BLOCK,
    SPAN,
    SPANS,
    TABLE_TOKENS,
    UNLIMITED,
    VARIANTS,
    Paged,
    Sequences,
    Shape,
    assert_close,
    attend,
    program,
    vars_of,
)

pytestmark = requires_native

# jax has two types for what a kernel refuses: the second from a program's second call on.
REFUSALS = (RuntimeError, ValueError)


def assert_decodes(shape: Shape, lengths: Sequence[int]) -> None:
    """Each sequence's last token in one step; a length of 0 is padding."""
    paged = Paged(Sequences(shape, lengths))
    for row, length in enumerate(lengths):
        paged.fill(row, max(0, length - 1))
    tokens = [(row, n - 1) for row, n in enumerate(lengths)]
    # Padding rows still bring a query.
    for row, n in enumerate(lengths):
        if n == 0:
            paged.sequences.queries[row] = np.ones((1, shape.num_heads, shape.head_dim), np.float32)
            paged.sequences.keys[row] = np.ones((1, shape.num_kv_heads, shape.head_dim), np.float32)
            paged.sequences.values[row] = np.ones(
                (1, shape.num_kv_heads, shape.stored_dim), np.float32
            )
    assert_close(paged, paged.step(tokens), tokens)


EDGES = [BLOCK - 1, 1, BLOCK, 0, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7, 300]


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_rows_of_any_length_attend_to_their_own_pages(page: int, dtype: str) -> None:
    assert_decodes(Shape(page=page, dtype=dtype), EDGES)


@pytest.mark.parametrize("window", [UNLIMITED, SPAN + 40])
def test_keys_beyond_a_span_are_added_to_those_before_it(window: int) -> None:
    assert_decodes(Shape(window=window), SPANS)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("head_dim", [1, 8, 16, 24, 64, 80, 128, 256])
def test_heads_of_any_size(head_dim: int, dtype: str) -> None:
    shape = Shape(head_dim=head_dim, dtype=dtype, scale=head_dim**-0.5)
    assert_decodes(shape, [3, BLOCK + 5, 200])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (3, 1), (9, 3), (16, 2)])
def test_heads_share_keys_in_groups(num_heads: int, num_kv_heads: int) -> None:
    assert_decodes(Shape(num_heads=num_heads, num_kv_heads=num_kv_heads), [3, BLOCK + 5, 200])


@pytest.mark.parametrize("window", [1, 5, 16, BLOCK, BLOCK + 40, 2 * BLOCK])
def test_a_window_hides_older_tokens(window: int) -> None:
    shape = Shape(window=window)
    lengths = [3, BLOCK + 2, 2 * BLOCK + 30, 300]
    paged = Paged(Sequences(shape, lengths))
    for row, length in enumerate(lengths):
        paged.fill(row, length - 1)
        # Pages behind the window are gone: others' by now, and the table's entries with them.
        gone = max(0, length - window) // shape.page
        paged.keys[paged.tables[row, :gone]] = np.nan
        paged.tables[row, :gone] = 0
    tokens = [(row, n - 1) for row, n in enumerate(lengths)]
    assert_close(paged, paged.step(tokens), tokens)


@pytest.mark.parametrize("window", [5, BLOCK, BLOCK + 40])
@pytest.mark.parametrize("start", [0, 40, 2 * BLOCK - 3])
def test_each_token_of_a_chunk_has_its_own_window(start: int, window: int) -> None:
    shape = Shape(window=window)
    paged = Paged(Sequences(shape, [start + 30]))
    paged.fill(0, start)
    positions = range(start, start + 30)
    assert_close(paged, paged.step([], (0, positions)), [(0, p) for p in positions])


def test_scores_are_capped_softly() -> None:
    assert_decodes(Shape(soft_cap=2.0, scale=3.0), EDGES)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("start", [0, BLOCK - 3, BLOCK, 2 * BLOCK - 8, 131])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 33])
def test_each_token_of_a_chunk_sees_what_came_before_it(
    start: int, length: int, dtype: str
) -> None:
    paged = Paged(Sequences(Shape(dtype=dtype), [start + length]))
    paged.fill(0, start)
    # The last two queries are padding.
    positions = [*range(start, start + length), -1, -1]
    result = paged.step([], (0, positions))
    assert_close(paged, result, [(0, position) for position in positions])


def test_decode_rows_and_a_chunk_share_a_step() -> None:
    lengths = [70, 1, 200, 150]
    paged = Paged(Sequences(Shape(), lengths))
    for row, end in enumerate([69, 0, 199, 120]):
        paged.fill(row, end)
    decodes, positions = [(0, 69), (1, -1), (1, 0), (2, 199)], [*range(120, 150), -1]
    result = paged.step(decodes, (3, positions))
    assert_close(paged, result, [*decodes, *((3, position) for position in positions)])


def test_a_step_of_padding_alone_is_zero() -> None:
    paged = Paged(Sequences(Shape(), [4, 4]))
    assert not paged.step([(0, -1)], (1, [-1] * 9)).any()


def test_scores_of_any_size_stay_finite() -> None:
    sequences = Sequences(Shape(dtype="f4"), [300])
    sequences.keys = [keys * np.float32(3e4) for keys in sequences.keys]
    paged = Paged(sequences)
    paged.fill(0, 299)
    assert_close(paged, paged.step([(0, 299)]), [(0, 299)])


def test_a_score_that_is_not_finite_shows_in_its_token_alone() -> None:
    sequences = Sequences(Shape(), [70, 70, 70])
    sequences.queries[1][69, 4, 3] = np.nan
    paged = Paged(sequences)
    for row in range(3):
        paged.fill(row, 69)
    result = paged.step([(row, 69) for row in range(3)])
    assert np.isnan(result[1, 4]).all()
    assert np.isfinite(result[[0, 2]]).all()
    assert np.isfinite(np.delete(result[1], 4, 0)).all()


# Sinks, and values that are not as long as keys.


@pytest.mark.parametrize("shape", VARIANTS, ids=range(len(VARIANTS)))
def test_variants_meet_the_definition(shape: Shape) -> None:
    assert_decodes(shape, [1, 0, 17, 63, 64, 65, 300, SPAN + 1])
    paged = Paged(Sequences(shape, [130, 40]))
    paged.fill(0, 90)
    paged.fill(1, 39)
    result = paged.step([(1, 39)], (0, range(90, 130)))
    assert_close(paged, result, [(1, 39), *((0, position) for position in range(90, 130))])


@pytest.mark.parametrize("changes", [{"shared_dim": 41}, {"value_dim": 8, "shared_dim": 9}])
def test_a_result_that_values_cannot_fill_is_refused(changes: dict[str, int]) -> None:
    shape = replace(Shape(num_kv_heads=1, head_dim=40, value_dim=0), **changes)
    paged = Paged(Sequences(shape, [1]))
    mixed_dim = shape.shared_dim
    call = program(shape.scale, 0.0, mixed_dim, 1)
    step = (
        *(np.stack([x[0][0]]) for x in vars_of(paged.sequences)),
        *(np.array([n], np.int32) for n in (0, paged.tables[0, 0], 0)),
        paged.tables,
    )
    pool = jnp.asarray(paged.keys), jnp.asarray(paged.values)
    with pytest.raises(REFUSALS, match="shapes differ"):
        jax.block_until_ready(call(pool, *step, np.int32(UNLIMITED), None))


# What is stored.


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("head_dim", [3, 8, 24])
def test_a_step_stores_its_tokens_exactly_and_nothing_else(head_dim: int, dtype: str) -> None:
    shape = Shape(head_dim=head_dim, dtype=dtype)
    paged = Paged(Sequences(shape, [20, 5]))
    paged.fill(0, 12)
    before = paged.keys.copy(), paged.values.copy()
    paged.step([(1, 4)], (0, range(12, 20)))
    wanted = [(1, 4), *((0, position) for position in range(12, 20))]
    for stored, old, given_ in zip(
        (paged.keys, paged.values),
        before,
        (paged.sequences.keys, paged.sequences.values),
        strict=True,
    ):
        for row, position in wanted:
            old[paged.place(row, position)] = given_[row][position].astype(dtype)
        np.testing.assert_array_equal(stored, old)


# Exact, halfway, denormal and infinite in float16, and next to those.
SPECIAL = [
    *(0.0, -0.0, 1.0, 2049.0, 2051.0, 0.1, 1 / 3),
    *(65504.0, 65519.0, 65520.0, 1e9, np.inf, -np.inf),
    *(6e-8, 2.9802322e-08, 2.98023224e-08, 5.9604645e-08, 8.9406967e-08),
    *(6.1e-5, 6.1035156e-05, 6.0975552e-05, 1e-45),
]


@pytest.mark.parametrize("name", instruction_sets())
def test_f16_rounds_as_numpy_does(name: str) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal(3000) * 10.0 ** rng.uniform(-9, 6, 3000)
    # Halfway between two neighbours of float16, where the even one is right.
    halves = np.arange(0, 2**14, 7, dtype=np.uint16).view(np.float16).astype(np.float64)
    above = (np.arange(0, 2**14, 7, dtype=np.uint16) + 1).view(np.float16).astype(np.float64)
    numbers = np.concatenate([SPECIAL, np.negative(SPECIAL), drawn, (halves + above) / 2])
    numbers = numbers[: len(numbers) // 13 * 13].astype(np.float32)
    # XLA flushes what is denormal in float32, which is far below float16.
    num, shape = len(numbers) // 13, Shape(num_heads=1, num_kv_heads=1, head_dim=13)
    paged = Paged(Sequences(shape, [num]))
    paged.sequences.keys = [numbers.reshape(num, 1, 13)]
    table = TABLE_TOKENS // shape.page
    with instructions(name):
        for first in range(0, min(num, table * shape.page), 100):
            paged.step([], (0, range(first, min(first + 100, num))))
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16).reshape(num, 13)
    stored = np.stack([paged.keys[paged.place(0, position)][0] for position in range(num)])
    np.testing.assert_array_equal(stored.view(np.uint16), expected.view(np.uint16))


def test_a_pool_that_is_given_away_is_written_in_place() -> None:
    paged = Paged(Sequences(Shape(), [20]))
    keys, values = jnp.asarray(paged.keys), jnp.asarray(paged.values)
    before = keys.unsafe_buffer_pointer(), values.unsafe_buffer_pointer()
    step = (
        *(np.stack([x[0][0]]) for x in vars_of(paged.sequences)),
        *(np.array([n], np.int32) for n in (0, paged.tables[0, 0], 0)),
        paged.tables,
    )
    _, new_keys, new_values = attend(paged.sequences.shape, 1, keys, values, step)
    assert (new_keys.unsafe_buffer_pointer(), new_values.unsafe_buffer_pointer()) == before
    assert keys.is_deleted()


# What is refused.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", -1),
        ("unit", 99),
        ("offset", -1),
        ("offset", 16),
        ("position", TABLE_TOKENS),
        ("position", 2**31 - 1),
        ("table", -1),
        ("table", 99),
    ],
)
@pytest.mark.parametrize("num_decodes", [0, 1])
def test_an_index_outside_the_pool_is_refused(name: str, value: int, num_decodes: int) -> None:
    paged = Paged(Sequences(Shape(), [20]))
    paged.fill(0, 19)
    unit, offset = paged.place(0, 19)
    step = {"position": 19, "unit": unit, "offset": offset} | {name: value}
    tables = paged.tables.copy()
    if name == "table":
        tables[0, 0] = value
    given_ = (
        *(np.stack([x[0][19]]) for x in vars_of(paged.sequences)),
        *(np.array([step[n]], np.int32) for n in ("position", "unit", "offset")),
        tables,
    )
    keys, values = jnp.asarray(paged.keys), jnp.asarray(paged.values)
    with pytest.raises(REFUSALS, match="position or a page is out of range"):
        jax.block_until_ready(attend(Shape(), num_decodes, keys, values, given_))
