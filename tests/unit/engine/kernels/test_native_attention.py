"""Native attention against a plain softmax in float64, and against itself bit by bit.

Every unit that a step does not name is NaN, so that one read too many shows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import native
from tests.native import instruction_sets, instructions, requires_native

pytestmark = requires_native

UNLIMITED = 2**30
# jax has two types for what a kernel refuses: the second from a program's second call on.
REFUSALS = (RuntimeError, ValueError)
TABLE_TOKENS = 1280
# Keys that the kernel walks at a time, and those after which it starts anew.
BLOCK = 64
SPAN = 512

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """What is fixed of an attention.

    Values are as long as keys, or `value_dim`; with 0 the first `shared_dim` components of the keys
    are the values.
    """

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    page: int = 16
    dtype: str = "f2"
    scale: float = 0.3
    soft_cap: float = 0.0
    window: int = UNLIMITED
    value_dim: int | None = None
    shared_dim: int = 0
    has_sinks: bool = False

    @property
    def stored_dim(self) -> int:
        """Components of a value in the pool."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def mixed_dim(self) -> int:
        return self.stored_dim or self.shared_dim

    @property
    def sinks(self) -> Float32 | None:
        if not self.has_sinks:
            return None
        return np.linspace(-3, 4, self.num_heads, dtype=np.float32)


@dataclass
class Sequences:
    """Tokens at positions 0 .. length - 1 of several sequences: what attention is made of."""

    shape: Shape
    lengths: Sequence[int]
    seed: int = 0
    queries: list[Float32] = field(init=False)
    keys: list[Float32] = field(init=False)
    values: list[Float32] = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        # Each sequence has its own numbers, whoever else is there.
        rngs = [np.random.default_rng([self.seed, n]) for n in self.lengths]

        def draw(num_heads: int, dim: int) -> list[Float32]:
            return [
                rng.standard_normal((n, num_heads, dim), np.float32)
                for n, rng in zip(self.lengths, rngs, strict=True)
            ]

        self.queries = draw(s.num_heads, s.head_dim)
        self.keys = draw(s.num_kv_heads, s.head_dim)
        self.values = draw(s.num_kv_heads, s.stored_dim)

    def expected(self, row: int, position: int) -> npt.NDArray[np.float64]:
        """One token by the definition, [num_heads, mixed_dim]."""
        s = self.shape
        if position < 0:
            return np.zeros((s.num_heads, s.mixed_dim))
        seen = slice(max(0, position - s.window + 1), position + 1)
        group = s.num_heads // s.num_kv_heads
        keys, values = (
            x[row][seen].astype(s.dtype).astype(np.float64).repeat(group, axis=1)
            for x in (self.keys, self.values if s.stored_dim else self.keys)
        )
        values = values[..., : s.mixed_dim]
        query = self.queries[row][position].astype(np.float64)
        scores = np.einsum("hd,shd->hs", query, keys) * np.float64(np.float32(s.scale))
        if s.soft_cap:
            scores = s.soft_cap * np.tanh(scores / s.soft_cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        total = weights.sum(-1, keepdims=True)
        if s.sinks is not None:
            total = total + np.exp(s.sinks[:, None] - scores.max(-1, keepdims=True))
        return np.einsum("hs,shd->hd", weights / total, values)


class Paged:
    """A pool with sequences in pages in random order; all else, the sink included, is NaN."""

    def __init__(self, sequences: Sequences, seed: int = 1) -> None:
        self.sequences, s = sequences, sequences.shape
        self.pages = [-(-n // s.page) for n in sequences.lengths]
        num_units = 1 + sum(self.pages) + 3
        order = iter(np.random.default_rng(seed).permutation(np.arange(1, num_units)))
        self.tables = np.zeros((len(self.pages), TABLE_TOKENS // s.page), np.int32)
        for row, count in enumerate(self.pages):
            self.tables[row, :count] = [next(order) for _ in range(count)]
        lead = (num_units, s.page, s.num_kv_heads)
        self.keys = np.full((*lead, s.head_dim), np.nan, s.dtype)
        self.values = np.full((*lead, s.stored_dim), np.nan, s.dtype)

    def place(self, row: int, position: int) -> tuple[int, int]:
        page = self.sequences.shape.page
        return int(self.tables[row, position // page]), position % page

    def fill(self, row: int, end: int) -> None:
        """Puts the keys and values of positions below `end` where steps would have put them."""
        for position in range(end):
            place = self.place(row, position)
            self.keys[place] = self.sequences.keys[row][position]
            self.values[place] = self.sequences.values[row][position]

    def step(
        self, decodes: Sequence[tuple[int, int]], chunk: tuple[int, Sequence[int]] | None = None
    ) -> Float32:
        """Runs a step: decode rows as (row, position), a chunk as (row, positions); -1 is padding.

        Keeps the pool that comes back; returns [tokens, num_heads, mixed_dim].
        """
        tokens = [*decodes]
        rows = [row for row, _ in decodes]
        if chunk is not None:
            tokens += [(chunk[0], position) for position in chunk[1]]
            rows.append(chunk[0])
        positions = np.array([position for _, position in tokens], np.int32)
        places = [self.place(r, p) if p >= 0 else (0, 0) for r, p in tokens]
        units, offsets = np.array(places, np.int32).reshape(-1, 2).T
        s = self.sequences
        queries, keys, values = (
            np.stack([x[row][max(position, 0)] for row, position in tokens])
            for x in (s.queries, s.keys, s.values)
        )
        out, new_keys, new_values = attend(
            s.shape,
            len(decodes),
            jnp.asarray(self.keys),
            jnp.asarray(self.values),
            (queries, keys, values, positions, units, offsets, self.tables[rows]),
        )
        self.keys, self.values = np.array(new_keys), np.array(new_values)
        return np.asarray(out)


def attend(
    shape: Shape, num_decodes: int, keys: jax.Array, values: jax.Array, step: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    run = program(shape.scale, shape.soft_cap, shape.mixed_dim, num_decodes)
    return run((keys, values), *step, np.int32(shape.window), shape.sinks)


@functools.cache
def program(scale: float, soft_cap: float, mixed_dim: int, num_decodes: int) -> Any:
    """One compiled call per set of static numbers, that owns the pool as the runner's does."""
    call = functools.partial(
        native.attend,
        mixed_dim=mixed_dim,
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
    )
    return jax.jit(call, donate_argnums=0)


def assert_close(paged: Paged, result: Float32, tokens: Sequence[tuple[int, int]]) -> None:
    assert len(result) == len(tokens)
    for found, (row, position) in zip(result, tokens, strict=True):
        expected = paged.sequences.expected(row, position)
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


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
SPANS = [SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 70]


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

VARIANTS = [
    Shape(has_sinks=True),
    Shape(has_sinks=True, window=40, dtype="f4", head_dim=24),
    Shape(head_dim=24, value_dim=12),
    Shape(head_dim=12, value_dim=40, dtype="f4"),
    # Latent attention: one key per token, which is its value too.
    Shape(num_heads=20, num_kv_heads=1, head_dim=40, value_dim=0, shared_dim=32),
    Shape(num_heads=5, num_kv_heads=1, head_dim=27, value_dim=0, shared_dim=9, has_sinks=True),
]


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


def vars_of(sequences: Sequences) -> tuple[list[Float32], list[Float32], list[Float32]]:
    return sequences.queries, sequences.keys, sequences.values


# Bit by bit.

BITS = [
    Shape(),
    Shape(dtype="f4", head_dim=24, num_heads=3, num_kv_heads=1),
    Shape(head_dim=80, window=100),
    Shape(head_dim=64, num_heads=9, num_kv_heads=3, soft_cap=4.0),
    *VARIANTS,
]
CROWD = [200, 64, 65, 1, 63, 128, 300, 17]
# More rows than are worth splitting: each walks its own spans, where one alone shares them out.
LONG = [*SPANS, 700, 3, *[5] * 30]


def decode_bits(shape: Shape, lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    paged = Paged(Sequences(shape, lengths), seed=len(lengths))
    for row, length in enumerate(lengths):
        paged.fill(row, length - 1)
    return paged.step([(row, n - 1) for row, n in enumerate(lengths)]).view(np.int32)


def chunk_bits(shape: Shape, length: int, sizes: Sequence[int]) -> npt.NDArray[np.int32]:
    """All tokens of a sequence, in chunks of these sizes, from the first on."""
    paged = Paged(Sequences(shape, [length]), seed=len(sizes))
    results: list[Float32] = []
    first = 0
    for size in sizes:
        results.append(paged.step([], (0, range(first, first + size))))
        first += size
    assert first == length
    return np.concatenate(results).view(np.int32)


@pytest.mark.parametrize("shape", BITS, ids=range(len(BITS)))
def test_a_token_is_the_same_alone_in_a_batch_in_chunks_and_on_any_page_size(shape: Shape) -> None:
    together = decode_bits(shape, CROWD)
    for isa in instruction_sets():
        with instructions(isa):
            np.testing.assert_array_equal(decode_bits(shape, CROWD), together, isa)
    for page in (16, 32, 64):
        other = replace(shape, page=page)
        for row, length in enumerate(CROWD):
            np.testing.assert_array_equal(decode_bits(other, [length])[0], together[row])
    whole = chunk_bits(shape, 200, [200])
    np.testing.assert_array_equal(whole[-1], together[0])
    for size in (1, 7, 8, 50, 64):
        sizes = [size] * (200 // size) + [200 % size] * bool(200 % size)
        np.testing.assert_array_equal(chunk_bits(shape, 200, sizes), whole, str(size))
    for isa in instruction_sets():
        with instructions(isa):
            np.testing.assert_array_equal(chunk_bits(shape, 200, [200]), whole, isa)


@pytest.mark.parametrize("shape", [Shape(), Shape(num_heads=5, num_kv_heads=1, window=SPAN + 9)])
def test_a_token_is_the_same_whether_its_spans_are_shared_out_or_not(shape: Shape) -> None:
    together = decode_bits(shape, LONG)
    for row, length in enumerate(LONG[:6]):
        for isa in instruction_sets():
            with instructions(isa):
                np.testing.assert_array_equal(decode_bits(shape, [length])[0], together[row])
    longest = SPANS[-1]
    for sizes in ([longest], [600, longest - 600], [SPAN, SPAN, longest - 2 * SPAN]):
        whole = chunk_bits(shape, longest, sizes)
        np.testing.assert_array_equal(whole[-1], together[len(SPANS) - 1], str(sizes))


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 100))
def test_any_split_into_chunks_gives_the_same_bits(data: st.DataObject, seed: int) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 3, 8, 16, 40]), min_size=1, max_size=8))
    shape = Shape(head_dim=8, num_heads=3, num_kv_heads=1, window=data.draw(st.integers(1, 120)))
    total = sum(sizes)
    # Padded to one width, so that few programs are compiled.
    results: list[Float32] = []
    paged = Paged(Sequences(shape, [total], seed), seed)
    first = 0
    for size in sizes:
        positions = [*range(first, first + size), *[-1] * (40 - size)]
        results.append(paged.step([], (0, positions))[:size])
        first += size
    single = Paged(Sequences(shape, [total], seed), seed + 1)
    single.fill(0, total - 1)
    alone = single.step([(0, total - 1)])[0]
    np.testing.assert_array_equal(np.concatenate(results)[-1], alone)
    assert_close(paged, np.concatenate(results), [(0, p) for p in range(total)])


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
