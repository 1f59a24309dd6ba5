"""Low-rank changes against their definition in float64, and native ones against themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gguf.layouts import Layout
from engine.kernels.lora import AdapterLists, Bank, Changes, adapt_embedding
from engine.kernels.qmatmul import MatrixStack, qmatmuls
from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.jitted import jitted
from tests.unit.engine.kernels.matrices import random_matrices

REFUSALS = (RuntimeError, ValueError)
# Relative to the sum of all terms' magnitudes.
TOLERANCE = 1e-5
LAYERS, PLACES = 2, 4
NUMBERS = {0: np.float32, 1: np.float16, 2: ml_dtypes.bfloat16}
LISTS = ((0,), (), (2, 1), (3, 0, 2, 1), (1,))

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
# Down, up and the factor.
Pair = tuple[Any, Any, float]


def _changed_products(
    arena: jax.Array,
    matrices: Sequence[MatrixStack],
    banks: Sequence[Bank | None] | None,
    layer: int,
    lists: AdapterLists,
    x: jax.Array,
    *,
    live: jax.Array | None,
    num_decodes: int,
) -> list[jax.Array]:
    changes = None if banks is None else Changes(banks, layer, lists, num_decodes)
    return qmatmuls(arena, matrices, x, live=live, changes=changes)


_products = jitted(_changed_products, static_argnames="num_decodes")
_adapt_embedding: Any = jitted(adapt_embedding, static_argnames="num_decodes")


@dataclass(frozen=True)
class Pairs:
    """Pairs of one weight by layer and place, as (down, up, factor); None where there is none."""

    rows: int
    cols: int
    rank: int
    held: Sequence[Sequence[Pair | None]]

    def exact(self, layer: int, place: int) -> tuple[Float64, Float64, float] | None:
        pair = self.held[layer][place] if place >= 0 else None
        return pair and (np.asarray(pair[0], np.float64), np.asarray(pair[1], np.float64), pair[2])

    def bank(self, *, is_native: bool, is_embedding: bool = False) -> Bank:
        """As `Bank` says, laid out by hand."""
        down_width, up_width = (self.rows, self.cols) if is_embedding else (self.cols, self.rows)
        dtype = np.uint32 if is_native else np.float32
        down = np.zeros((LAYERS, PLACES, self.rank * down_width), dtype)
        up = np.zeros((LAYERS, PLACES, self.rank * up_width), dtype)
        entries = np.zeros((LAYERS, PLACES), np.int32)
        factors = np.zeros((LAYERS, PLACES), np.float32)
        for layer, places in enumerate(self.held):
            for place, pair in enumerate(places):
                if pair is None:
                    continue
                number = {np.dtype(kind): n for n, kind in NUMBERS.items()}[pair[0].dtype]
                rank = len(pair[1])
                entries[layer, place], factors[layer, place] = 4 * rank + number, pair[2]
                for target, values in ((down, pair[0]), (up, pair[1])):
                    own = target[layer, place]
                    if is_native:
                        raw = values.tobytes()
                        own.view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
                    elif is_embedding and target is down:
                        own.reshape(-1, self.rank)[:, :rank] = values.astype(np.float32)
                    else:
                        own[: values.size] = values.astype(np.float32).ravel()
        return Bank(
            jnp.array(down),
            jnp.array(up),
            jnp.array(entries),
            jnp.array(factors),
            self.rows,
            self.cols,
            self.rank,
            is_native,
        )


def pairs(rows: int, cols: int, seed: int = 0, *, is_embedding: bool = False) -> Pairs:
    """Ranks from 1 to 8 in every precision; place 2 of layer 1 is empty."""
    rng = np.random.default_rng(seed)

    def one(index: int) -> Pair:
        rank, kind = (1, 4, 8, 5, 3)[index % 5], NUMBERS[index % 3]
        shape = (rows, rank) if is_embedding else (rank, cols)
        width = cols if is_embedding else rows
        down = (rng.standard_normal(shape) / 4).astype(kind)
        up = (rng.standard_normal((rank, width)) / 4).astype(kind)
        return down, up, float(np.float32(rng.uniform(0.5, 2)))

    held: list[list[Pair | None]] = [
        [one(layer * PLACES + place) for place in range(PLACES)] for layer in range(LAYERS)
    ]
    held[1][2] = None
    return Pairs(rows, cols, 8, held)


def lists_of(chosen: Sequence[Sequence[int]], seed: int = 5) -> AdapterLists:
    rng = np.random.default_rng(seed)
    places = np.full((len(chosen), PLACES), -1, np.int32)
    scales = np.zeros((len(chosen), PLACES), np.float32)
    for row, own in enumerate(chosen):
        places[row, : len(own)] = own
        scales[row, : len(own)] = rng.uniform(-2, 2, len(own))
    return AdapterLists(jnp.array(places), jnp.array(scales))


def definition(
    own: Pairs, layer: int, lists: AdapterLists, inputs: Any, y: Float32, num_decodes: int
) -> tuple[Float64, Float64]:
    """The result, and the sum of magnitudes; `inputs` are x, or tokens of an embedding."""
    places, scales = np.asarray(lists.places), np.asarray(lists.scales)
    result, size = y.astype(np.float64), np.abs(y).astype(np.float64)
    for token in range(len(y)):
        row = min(token, num_decodes)
        for place, scale in zip(places[row].tolist(), scales[row].tolist(), strict=True):
            pair = own.exact(layer, place)
            if pair is None:
                continue
            down, up, factor = pair
            is_embedding = inputs.ndim == 1
            inner: Float64 = down[inputs[token]] if is_embedding else down @ inputs[token]
            bound: Float64 = np.abs(inner) if is_embedding else np.abs(down) @ np.abs(inputs[token])
            result[token] += scale * factor * (inner @ up)
            size[token] += abs(scale * factor) * (bound @ np.abs(up))
    return result, size


def products(
    shapes: Sequence[tuple[int, int]],
    banks: Sequence[Bank | None] | None,
    layer: int,
    lists: AdapterLists,
    x: Any,
    *,
    is_native: bool,
    num_decodes: int,
    live: Any = None,
) -> list[Float32]:
    """Products of x with random matrices of these shapes, with what the banks add to them."""
    dense = Layout("dense", dtype="f32")
    packed = random_matrices(9, {str(i): (dense, *shape) for i, shape in enumerate(shapes)})
    matrices = [
        MatrixStack.of([matrix], is_native=is_native).single()
        for matrix in packed.matrices.values()
    ]
    arena = jnp.asarray(packed.data)
    given = (arena, matrices, banks, layer, lists, jnp.asarray(x))
    return [np.asarray(y) for y in _products(*given, live=live, num_decodes=num_decodes)]


WAYS = [False, pytest.param(True, marks=requires_native)]


@pytest.mark.parametrize("is_native", WAYS)
@pytest.mark.parametrize("num_tokens", [4, 5, 6, 13, 70])
@pytest.mark.parametrize(
    "shapes", [((16, 32),), ((5, 17), (33, 17)), ((96, 64), (40, 64), (40, 64))]
)
def test_products_change_as_defined(
    shapes: Sequence[tuple[int, int]], num_tokens: int, *, is_native: bool
) -> None:
    rng = np.random.default_rng(1)
    own = [pairs(rows, cols, seed) for seed, (rows, cols) in enumerate(shapes)]
    chosen = LISTS[: min(num_tokens, len(LISTS))]
    num_decodes = 4
    lists = lists_of(chosen)
    x = rng.standard_normal((num_tokens, shapes[0][1])).astype(np.float32)
    run = partial(products, shapes, is_native=is_native, num_decodes=num_decodes)
    plain = run(None, 0, lists, x)
    for layer in range(LAYERS):
        banks = [one.bank(is_native=is_native) for one in own]
        got = run(banks, layer, lists, x)
        for one, y, result in zip(own, plain, got, strict=True):
            expected, size = definition(one, layer, lists, x, y, num_decodes)
            assert (np.abs(result - expected) <= TOLERANCE * size).all()


@pytest.mark.parametrize("is_native", WAYS)
def test_a_product_without_a_bank_is_left_alone(*, is_native: bool) -> None:
    bank = pairs(8, 16).bank(is_native=is_native)
    shapes, x = ((8, 16), (8, 16)), jnp.ones((2, 16))
    run = partial(products, shapes, is_native=is_native, num_decodes=2)
    plain = run(None, 0, lists_of(LISTS[:2]), x)
    same, changed = run([None, bank], 0, lists_of(LISTS[:2]), x)
    np.testing.assert_array_equal(same, plain[0])
    assert not np.array_equal(changed[0], plain[1][0])
    np.testing.assert_array_equal(changed[1], plain[1][1])
    for own, y in zip(run([None, None], 0, lists_of(LISTS[:2]), x), plain, strict=True):
        np.testing.assert_array_equal(own, y)


@requires_native
def test_padding_stays_zero_and_changes_nothing() -> None:
    """Rows between and after live ones, in a chunk too, whatever they hold and list."""
    own, shape = pairs(37, 50), (37, 50)
    lists = lists_of(LISTS)
    x = np.random.default_rng(4).standard_normal((23, 50)).astype(np.float32)
    live = np.arange(23)
    live[[0, 3, 9, 10, 20, 21, 22]] = -1
    bank = own.bank(is_native=True)
    run = partial(products, [shape], [bank], 1, lists, is_native=True, num_decodes=4)
    (whole,) = run(x)
    (result,) = run(np.where(live[:, None] < 0, np.nan, x), live=jnp.asarray(live, jnp.int32))
    np.testing.assert_array_equal(result[live >= 0], whole[live >= 0])
    assert not result[live < 0].any()


@pytest.mark.parametrize("is_native", WAYS)
def test_embeddings_change_as_defined(*, is_native: bool) -> None:
    own = pairs(50, 24, is_embedding=True)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 50, 11).astype(np.int32)
    y = rng.standard_normal((11, 24)).astype(np.float32)
    lists = lists_of(LISTS)
    bank = own.bank(is_native=is_native, is_embedding=True)
    got = np.asarray(_adapt_embedding(bank, lists, tokens, y, num_decodes=4))
    expected, size = definition(own, 0, lists, tokens, y, 4)
    assert (np.abs(got - expected) <= TOLERANCE * size).all()


def run_native(own: Pairs, lists: AdapterLists, x: Any, num_decodes: int) -> Float32:
    bank = own.bank(is_native=True)
    shapes = [(own.rows, own.cols)]
    (got,) = products(shapes, [bank], 0, lists, x, is_native=True, num_decodes=num_decodes)
    return got


@requires_native
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6), st.integers(0, 40), st.integers(0, 1000))
def test_a_token_does_not_see_the_others(num_decodes: int, chunk: int, seed: int) -> None:
    """Every token alone, as a decode row, has the bits that it has in any step."""
    rng = np.random.default_rng(seed)
    own = pairs(37, 50)
    num_rows = num_decodes + (1 if chunk else 0)
    if not num_rows:
        return
    chosen: list[Sequence[int]] = [LISTS[i] for i in rng.integers(0, len(LISTS), num_rows)]
    lists = lists_of(chosen, seed)
    x = rng.standard_normal((num_decodes + chunk, 50)).astype(np.float32)
    together = run_native(own, lists, x, num_decodes)
    for token in {0, num_decodes + chunk - 1, *rng.integers(0, num_decodes + chunk, 3).tolist()}:
        row = min(token, num_decodes)
        alone = AdapterLists(lists.places[row : row + 1], lists.scales[row : row + 1])
        solo = run_native(own, alone, x[token : token + 1], 1)
        np.testing.assert_array_equal(solo[0].view(np.int32), together[token].view(np.int32))


@requires_native
def test_every_instruction_set_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    own, lists = pairs(200, 131), lists_of(LISTS)
    x = rng.standard_normal((40, 131)).astype(np.float32)
    results: list[Any] = []
    for name in instruction_sets():
        with instructions(name):
            results.append(run_native(own, lists, x, 4).view(np.int32))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@requires_native
@pytest.mark.parametrize("place", [PLACES, 2**31 - 1])
def test_a_place_that_does_not_exist_is_refused(place: int) -> None:
    lists = lists_of(LISTS[:2])
    lists = replace(lists, places=lists.places.at[0, 0].set(place))
    with pytest.raises(REFUSALS, match="no such place"):
        run_native(pairs(8, 16), lists, jnp.ones((2, 16)), 2)


@requires_native
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (4 * 17, "larger than its place"),
        (-4, "no known form"),
        (4 * 2 + 3, "no known form"),
        (1, "no known form"),
        (4 * 513, "no known form"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(entry: int, message: str) -> None:
    bank = pairs(8, 16).bank(is_native=True)
    bank = replace(bank, entries=bank.entries.at[0, 3].set(entry))
    given = (lists_of(LISTS[:2]), jnp.ones((2, 16)))
    with pytest.raises(REFUSALS, match=message):
        products([(8, 16)], [bank], 0, *given, is_native=True, num_decodes=2)


@requires_native
@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_a_layer_that_does_not_exist_is_refused(layer: int) -> None:
    bank = pairs(8, 16).bank(is_native=True)
    given = (lists_of(LISTS[:2]), jnp.ones((2, 16)))
    with pytest.raises(REFUSALS, match="shapes differ"):
        products([(8, 16)], [bank], layer, *given, is_native=True, num_decodes=2)


@requires_native
@pytest.mark.parametrize("token", [-1, 50])
def test_a_token_that_does_not_exist_is_refused(token: int) -> None:
    bank = pairs(50, 24, is_embedding=True).bank(is_native=True, is_embedding=True)
    tokens = jnp.array([token], jnp.int32)
    with pytest.raises(REFUSALS, match="no such token"):
        _adapt_embedding(bank, lists_of(LISTS[:1]), tokens, jnp.ones((1, 24)), num_decodes=1)
