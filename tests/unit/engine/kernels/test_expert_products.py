"""Products of each row with matrices of its own, on XLA and natively, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from engine.gguf.layouts import Layout, layout_for
from engine.kernels import expert_groups, native, qmatmul
from engine.kernels.qmatmul import MatrixStack
from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.jitted import jitted
from tests.unit.engine.kernels.matrices import DENSE, QUANTISED, Packed, label, random_matrices
from tests.unit.engine.kernels.test_native_qmatmul import (
    REFUSALS,
    TOLERANCE,
    decoded_activations,
    inputs,
)

COUNT, ROWS, COLS = 7, 40, 256
LAYOUTS = [*QUANTISED, *DENSE]

Ids = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

products = jitted(qmatmul.expert_products)


def make(layout: Layout, count: int = COUNT, rows: int = ROWS, cols: int = COLS) -> Packed:
    """Matrices one behind another, at equal distances."""
    return random_matrices(3, {f"{i}": (layout, rows, cols) for i in range(count)})


def stack_of(packed: Packed, *, is_native: bool) -> MatrixStack:
    first, second = packed.matrices["0"], packed.matrices["1"]
    whole = dataclasses.replace(
        first,
        count=len(packed.matrices),
        stride_blocks=second.codes_block - first.codes_block,
    )
    return MatrixStack.of([whole], is_native=is_native).single()


def product(packed: Packed, x: Float32, ids: Ids, *, is_native: bool) -> Float32:
    stack = stack_of(packed, is_native=is_native)
    (y,) = products(jnp.asarray(packed.data), [stack], jnp.asarray(x), jnp.asarray(ids))
    return np.asarray(y)


def random_ids(num: int, used: int, seed: int = 0, count: int = COUNT) -> Ids:
    rng = np.random.default_rng(seed)
    rows = [rng.choice(count, used, replace=False) for _ in range(num)]
    return np.array(rows, np.int32).reshape(num, used)


def assert_products(packed: Packed, x: npt.NDArray[np.float64], ids: Ids, y: Float32) -> None:
    assert y.shape == (*ids.shape, ROWS)
    for n, k in np.ndindex(*ids.shape):
        weights = packed.values[f"{ids[n, k]}"].astype(np.float64)
        magnitude = (
            np.abs(x[n]) @ np.abs(weights).T + 2 * np.abs(x[n]).sum() * np.abs(weights).max()
        )
        assert (np.abs(y[n, k] - weights @ x[n]) <= TOLERANCE * magnitude).all()


@requires_native
@pytest.mark.parametrize("layout", LAYOUTS, ids=label)
def test_native_products_are_those_of_each_rows_own_matrices(layout: Layout) -> None:
    packed = make(layout)
    for num, used in ((1, 1), (1, 5), (2, 3), (30, 4), (9, 7)):
        x, ids = inputs(num, COLS, num), random_ids(num, used, num)
        seen = x.astype(np.float64) if layout.kind == "dense" else decoded_activations(x)
        assert_products(packed, seen, ids, product(packed, x, ids, is_native=True))


# One of each kind: what the layouts decode to is the business of the plain products.
PLAIN = [layout for t in (Type.Q4_1, Type.Q8_0, Type.F16) if (layout := layout_for(t)) is not None]


@pytest.mark.parametrize("layout", PLAIN, ids=label)
def test_xla_products_are_those_of_each_rows_own_matrices(layout: Layout) -> None:
    packed = make(layout)
    for num, used in ((1, 5), (30, 4)):
        x, ids = inputs(num, COLS, num), random_ids(num, used, num)
        y = product(packed, x, ids, is_native=False)
        assert_products(packed, x.astype(np.float64), ids, y)


@requires_native
@pytest.mark.parametrize("layout", [QUANTISED[0], QUANTISED[5], DENSE[0]], ids=label)
def test_no_native_bit_depends_on_other_rows_or_the_instruction_set(layout: Layout) -> None:
    packed = make(layout)
    x, ids = inputs(33, COLS), random_ids(33, 4)
    whole = product(packed, x, ids, is_native=True).view(np.int32)
    for isa in instruction_sets():
        with instructions(isa):
            for first, end in ((0, 33), (0, 1), (5, 7), (20, 33)):
                part = product(packed, x[first:end], ids[first:end], is_native=True)
                np.testing.assert_array_equal(part.view(np.int32), whole[first:end], isa)
            # One expert at a time, and all rows of the same expert.
            for k in range(4):
                part = product(packed, x, ids[:, k : k + 1], is_native=True)
                np.testing.assert_array_equal(part.view(np.int32)[:, 0], whole[:, k], isa)


@requires_native
def test_native_stacks_of_several_layouts_share_a_call() -> None:
    layouts = [QUANTISED[0], DENSE[2]]
    shapes = {f"{kind}{i}": (layouts[kind], ROWS, COLS) for kind in (0, 1) for i in range(3)}
    packed = random_matrices(0, shapes)
    stacks: list[MatrixStack] = []
    for kind in (0, 1):
        first, second = packed.matrices[f"{kind}0"], packed.matrices[f"{kind}1"]
        stride = second.codes_block - first.codes_block
        whole = dataclasses.replace(first, count=3, stride_blocks=stride)
        stacks.append(MatrixStack.of([whole], is_native=True).single())
    x, ids = inputs(4, COLS), np.array([[2, 0], [1, 2], [2, 1], [0, 1]], np.int32)
    results = products(jnp.asarray(packed.data), stacks, jnp.asarray(x), jnp.asarray(ids))
    seen = (decoded_activations(x), x.astype(np.float64))
    for kind, result in enumerate(results):
        values = {f"{i}": packed.values[f"{kind}{i}"] for i in range(3)}
        own = Packed(packed.data, packed.matrices, values)
        assert_products(own, seen[kind], ids, np.asarray(result))


@requires_native
def test_no_native_rows_are_no_work() -> None:
    packed = make(QUANTISED[0])
    x, ids = np.zeros((0, COLS), np.float32), np.zeros((0, 2), np.int32)
    assert product(packed, x, ids, is_native=True).shape == (0, 2, ROWS)


@requires_native
@pytest.mark.parametrize("expert", [-1, COUNT, 2**31 - 1, -(2**31)])
def test_a_native_expert_that_is_not_there_is_refused(expert: int) -> None:
    packed = make(QUANTISED[0])
    ids = np.array([[0, expert]], np.int32)
    with pytest.raises(REFUSALS, match="no such matrix"):
        product(packed, inputs(1, COLS), ids, is_native=True)


@requires_native
@pytest.mark.parametrize("stride", [-1, 1000, 2**31 - 1])
def test_a_native_stack_that_leaves_the_arena_is_refused(stride: int) -> None:
    packed = make(QUANTISED[0])
    first = packed.matrices["0"]
    table = [0, first.codes_block, first.scales_block or 0, first.offsets_block or 0, stride]
    arguments = (
        jnp.asarray(packed.data),
        jnp.array([table], jnp.int32),
        jnp.asarray(inputs(1, COLS)),
    )
    with pytest.raises(REFUSALS, match="not inside the arena"):
        native.expert_products(
            *arguments, jnp.zeros((1, 1), jnp.int32), [ROWS], [QUANTISED[0]], COUNT
        ).block_until_ready()


def test_the_xla_program_knows_neither_experts_nor_rows() -> None:
    """Its loop runs over blocks of rows: as many instructions for 4 experts as for 64."""

    def size(count: int, num: int) -> int:
        packed = make(DENSE[0], count, 32, 32)
        stack = stack_of(packed, is_native=False)
        ids = jnp.asarray(random_ids(num, 2, count=count))
        arguments = jnp.asarray(packed.data), [stack], jnp.asarray(inputs(num, 32)), ids
        return len(jax.jit(qmatmul.expert_products).lower(*arguments).as_text().splitlines())

    assert size(64, 4) == size(4, 4)


@given(ids=st.lists(st.integers(0, 8), min_size=1, max_size=60), spare=st.integers(0, 3))
def test_blocks_hold_each_experts_rows_in_order(ids: Sequence[int], spare: int) -> None:
    grouping = expert_groups.group(jnp.array(ids, jnp.int32), 9 + spare)
    places, size = np.asarray(grouping.places), grouping.block_rows
    assert len(set(places.tolist())) == len(ids)
    owner = np.asarray(grouping.block_expert)[places // size]
    np.testing.assert_array_equal(owner, ids)
    blocks = sum(-(-ids.count(expert) // size) for expert in set(ids))
    assert int(grouping.num_blocks) == blocks <= len(grouping.block_expert)
    assert places.max() < blocks * size
    values = jnp.arange(2 * len(ids), dtype=jnp.float32).reshape(-1, 2)
    np.testing.assert_array_equal(grouping.scatter(grouping.gather(values)), values)
