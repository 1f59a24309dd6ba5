"""Native products against their definition in float64, and against themselves bit by bit.

Definition: x is quantised in groups of 32 columns, to 8 or (fine) to 16 bits; its products with a
matrix are those of the decoded matrix with the decoded activations. Dense matrices take x as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gguf.encode import Planes
from engine.gguf.layouts import Layout
from engine.kernels import flow, native, qmatmul
from engine.kernels.qmatmul import MatrixStack, gather_rows
from tests.native import instruction_sets, instructions, requires_native
from tests.unit.engine.jitted import jitted
from tests.unit.engine.kernels.matrices import (
    DENSE,
    QUANTISED,
    Packed,
    label,
    pack,
    random_matrices,
    random_planes,
)

pytestmark = requires_native

# jax has two types for what a kernel refuses: the second from a program's second call on.
REFUSALS = (RuntimeError, ValueError)
# Relative to the sum of all terms' magnitudes.
TOLERANCE = 1e-5
# XLA runs with denormals flushed to zero.
FLOOR = 1e-36
NUMS = [1, 2, 3, 7, 8, 9, 17, 40]
LAYOUTS = [*QUANTISED, *DENSE]
# Tiles of one row, whole ones, one more, and enough work for several threads.
SHAPES = [(1, 32), (16, 64), (17, 96), (50, 320), (531, 512)]
# A dense matrix takes any number of columns.
ODD_SHAPES = [(1, 1), (5, 15), (33, 17), (50, 47), (700, 515)]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Marks = Sequence[int]

products = jitted(qmatmul.qmatmuls)
fine_products = jitted(partial(qmatmul.qmatmuls, is_fine=True))
both_precisions = pytest.mark.parametrize("is_fine", [False, True], ids=["8-bit", "16-bit"])
gather = jitted(gather_rows)


@dataclass(frozen=True)
class Case:
    """An arena on the device."""

    packed: Packed

    @cached_property
    def arena(self) -> jax.Array:
        return jnp.asarray(self.packed.data)

    def stack(self, *names: str) -> MatrixStack:
        return MatrixStack.of([self.packed.matrices[name] for name in names], is_native=True)

    def one(self, name: str) -> MatrixStack:
        return self.stack(name).single()

    def products(
        self, names: Sequence[str], x: Float32, *, is_fine: bool = False, live: Marks | None = None
    ) -> list[Float32]:
        """One native call for all of them."""
        matrices = [self.one(name) for name in names]
        marks = None if live is None else jnp.asarray(live, jnp.int32)
        call = fine_products if is_fine else products
        return [np.asarray(y) for y in call(self.arena, matrices, jnp.asarray(x), live=marks)]

    def product(self, name: str, x: Float32) -> Float32:
        return self.products([name], x)[0]


def make(shapes: Mapping[str, tuple[Layout, int, int]], seed: int = 5) -> Case:
    return Case(random_matrices(seed, shapes))


def named(layout: Layout, rows: int, cols: int) -> str:
    return f"{label(layout)} {rows}x{cols}"


@pytest.fixture(scope="module")
def every_layout() -> Case:
    shapes = [(layout, *shape) for layout in LAYOUTS for shape in SHAPES]
    shapes += [(layout, *shape) for layout in DENSE for shape in ODD_SHAPES]
    return make({named(*shape): shape for shape in shapes})


def inputs(num: int, cols: int, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).standard_normal((num, cols), np.float32)


def decoded_activations(x: Float32, *, is_fine: bool = False) -> Float64:
    """What the products see of x: per group of 32, codes round(x * (127 / most)), half to even.

    Fine ones see what that leaves too, in 256ths of a code, up to 127.
    """
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    exact = groups * inverse
    codes = np.rint(exact)
    assert np.abs(codes).max() <= 127
    scale = most / np.float32(127)
    if is_fine:
        scale = scale / np.float32(256)
        codes = 256 * codes + np.clip(np.rint((exact - codes) * np.float32(256)), -127, 127)
    return (codes.astype(np.float64) * scale).reshape(x.shape)


def assert_products(
    case: Case, name: str, x: Float32, result: Float32, *, is_fine: bool = False
) -> None:
    layout = case.packed.matrices[name].layout
    weights = case.packed.values[name].astype(np.float64)
    is_dense = layout.kind == "dense"
    wide = x.astype(np.float64) if is_dense else decoded_activations(x, is_fine=is_fine)
    assert result.shape == (len(x), len(weights))
    assert result.dtype == np.float32
    # A code and its offset are two terms, which nearly cancel in some layouts.
    magnitude = np.abs(wide) @ np.abs(weights).T
    if layout.has_offset:
        magnitude = magnitude + 2 * np.abs(wide).sum(-1, keepdims=True) * np.abs(weights).max()
    error = np.abs(result - wide @ weights.T)
    worst = (error / np.maximum(magnitude, 1e-30)).max()
    assert (error <= TOLERANCE * magnitude + FLOOR).all(), f"{name}: {worst:.1e}"


@both_precisions
@pytest.mark.parametrize("num", NUMS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_products_are_those_of_the_decoded_matrix_and_activations(
    every_layout: Case, num: int, shape: tuple[int, int], is_fine: bool
) -> None:
    names = [named(layout, *shape) for layout in LAYOUTS]
    x = inputs(num, shape[1])
    results = every_layout.products(names, x, is_fine=is_fine)
    for name, result in zip(names, results, strict=True):
        assert_products(every_layout, name, x, result, is_fine=is_fine)


def test_16_bits_are_a_hundred_times_nearer_to_the_inputs(every_layout: Case) -> None:
    names = [named(layout, 531, 512) for layout in QUANTISED]
    x = inputs(9, 512)
    for name in names:
        exact = x.astype(np.float64) @ every_layout.packed.values[name].astype(np.float64).T
        coarse, fine = (
            np.square(every_layout.products([name], x, is_fine=is_fine)[0] - exact).mean()
            for is_fine in (False, True)
        )
        assert 1e4 * fine < coarse, name


@both_precisions
@settings(max_examples=30)
@given(data=st.data())
def test_padding_is_zero_and_changes_nothing(
    every_layout: Case, data: st.DataObject, is_fine: bool
) -> None:
    names = [named(layout, 50, 320) for layout in LAYOUTS]
    live = data.draw(st.lists(st.sampled_from([-1, 0, 7]), min_size=1, max_size=24))
    is_live = np.array(live) >= 0
    x = inputs(len(live), 320)
    results = every_layout.products(names, np.where(is_live[:, None], x, np.nan), live=live)
    for result, whole in zip(results, every_layout.products(names, x), strict=True):
        np.testing.assert_array_equal(result[is_live], whole[is_live])
        assert not result[~is_live].any()


@pytest.mark.parametrize("num", NUMS)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_a_dense_matrix_has_any_number_of_columns(
    every_layout: Case, num: int, shape: tuple[int, int]
) -> None:
    names = [named(layout, *shape) for layout in DENSE]
    x = inputs(num, shape[1])
    for name, result in zip(names, every_layout.products(names, x), strict=True):
        assert_products(every_layout, name, x, result)


@both_precisions
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_meets_the_definition(
    every_layout: Case, name: str, is_fine: bool
) -> None:
    names = [named(layout, 50, 320) for layout in LAYOUTS]
    x = inputs(9, 320)
    with instructions(name):
        results = every_layout.products(names, x, is_fine=is_fine)
    for matrix, result in zip(names, results, strict=True):
        assert_products(every_layout, matrix, x, result, is_fine=is_fine)


@both_precisions
@pytest.mark.parametrize(
    "shape", [*SHAPES, *ODD_SHAPES], ids=lambda shape: f"{shape[0]}x{shape[1]}"
)
def test_every_bit_is_the_same_alone_in_company_and_on_every_instruction_set(
    every_layout: Case, shape: tuple[int, int], is_fine: bool
) -> None:
    layouts = LAYOUTS if shape in SHAPES else DENSE
    names = [named(layout, *shape) for layout in layouts]
    x = inputs(40, shape[1])
    expected = every_layout.products(names, x, is_fine=is_fine)
    for isa in instruction_sets():
        with instructions(isa):
            for num in (40, 17, 9, 8, 7, 3, 2, 1):
                results = every_layout.products(names, x[-num:], is_fine=is_fine)
                for name, result, whole in zip(names, results, expected, strict=True):
                    np.testing.assert_array_equal(
                        result.view(np.int32), whole[-num:].view(np.int32), f"{name} {isa} {num}"
                    )


def test_a_row_is_the_same_whatever_the_others_hold(every_layout: Case) -> None:
    names = [named(layout, 17, 96) for layout in LAYOUTS]
    x = inputs(8, 96)
    expected = every_layout.products(names, x)
    x[:3], x[4:] = np.nan, 3e38
    for result, whole in zip(every_layout.products(names, x), expected, strict=True):
        np.testing.assert_array_equal(result[3], whole[3])


def test_zeros_give_zeros(every_layout: Case) -> None:
    names = [named(layout, 50, 320) for layout in LAYOUTS]
    for result in every_layout.products(names, np.zeros((3, 320), np.float32)):
        assert not result.any()


@both_precisions
@pytest.mark.parametrize("size", [1e37, 1e30, 1e-10, 1e-25])
def test_inputs_of_any_size_keep_their_precision(
    every_layout: Case, size: float, is_fine: bool
) -> None:
    names = [named(layout, 17, 96) for layout in LAYOUTS]
    x = np.clip(inputs(3, 96), -3, 3) * np.float32(size)
    x[1, 32:64] = 0
    x[2, 5] = 1e-3
    results = every_layout.products(names, x, is_fine=is_fine)
    for name, result in zip(names, results, strict=True):
        assert_products(every_layout, name, x, result, is_fine=is_fine)


@pytest.mark.parametrize("size", [1e-34, 1e-36, 1e-38, 1e-40, 1e-44])
def test_inputs_that_float32_hardly_holds_are_as_good_as_zero(
    every_layout: Case, size: float
) -> None:
    names = [named(layout, 17, 96) for layout in LAYOUTS]
    x = inputs(3, 96) * np.float32(size)
    x[1, :] = np.float32(size)
    for name, result in zip(names, every_layout.products(names, x), strict=True):
        weights = every_layout.packed.values[name].astype(np.float64)
        # The product of two scales may be denormal, which is zero, times a sum of up to 10**6.
        np.testing.assert_allclose(result, x.astype(np.float64) @ weights.T, rtol=0, atol=1e-31)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_input_that_is_not_finite_shows_in_its_row_alone(
    every_layout: Case, value: float
) -> None:
    names = [named(layout, 17, 96) for layout in LAYOUTS]
    x = inputs(9, 96)
    x[4, 33] = value
    for name, result in zip(names, every_layout.products(names, x), strict=True):
        assert not np.isfinite(result[4]).any(), name
        assert np.isfinite(np.delete(result, 4, 0)).all(), name


@pytest.mark.parametrize("layout", [q for q in QUANTISED if not q.has_offset], ids=label)
def test_denormal_scales_neither_vanish_nor_grow(layout: Layout) -> None:
    planes = random_planes(np.random.default_rng(0), layout, 20, 64)
    scales = planes.scales
    assert scales is not None
    if layout.scale_dtype == "e8":
        scales = np.full_like(scales, 0)  # the smallest power there is
    elif layout.scale_dtype == "f16":
        scales = np.full_like(scales, 6e-8)
    else:
        scales[:, :2] = np.full((len(scales), 1), 6e-8, np.float16).view(np.uint8)
    case = Case(pack({"w": (layout, Planes(planes.codes, scales))}))
    x = inputs(3, 64) * np.float32(1e6)
    assert_products(case, "w", x, case.product("w", x))


@both_precisions
@pytest.mark.parametrize("code", [0, 1, -1, 127, -128])
@pytest.mark.parametrize("layout", QUANTISED, ids=label)
def test_sums_of_the_largest_codes_do_not_saturate(
    layout: Layout, code: int, is_fine: bool
) -> None:
    planes = random_planes(np.random.default_rng(0), layout, 18, 512)
    if not layout.is_packed:
        code = max(-layout.code_bound, min(code, layout.code_bound))
    planes = planes._replace(codes=np.full_like(planes.codes, code & 255))
    case = Case(pack({"w": (layout, planes)}))
    signs = np.sign(inputs(5, 512))
    signs[0], signs[1] = 1, -1
    signs[2, 0::2], signs[2, 1::2] = 1, -1
    x = signs.astype(np.float32) * 127
    if is_fine:  # the largest of each group, then what is largest in both halves of the bits
        x[:, np.arange(512) % 32 > 0] *= np.float32(126.498 / 127)
    for isa in instruction_sets():
        with instructions(isa):
            (result,) = case.products(["w"], x, is_fine=is_fine)
            assert_products(case, "w", x, result, is_fine=is_fine)


@settings(max_examples=60)
@given(st.data())
def test_values_at_ties_round_to_even(data: st.DataObject) -> None:
    """The identity matrix in 8 bits shows the codes themselves."""
    halves = data.draw(st.lists(st.integers(-253, 253), min_size=31, max_size=31))
    x = np.array([[127, *(half / 2 for half in halves)]], np.float32)
    layout = Layout("q8", group=32, scale_dtype="f16", is_tiled=True)
    identity = Planes(np.eye(32, dtype=np.uint8)[:, None], np.ones((32, 1), np.float16))
    result = Case(pack({"w": (layout, identity)})).product("w", x)
    np.testing.assert_array_equal(result[0], np.rint(x[0]))


@settings(max_examples=40)
@given(
    num=st.integers(1, 20),
    rows=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    groups=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_matrices_share_a_call(num: int, rows: list[int], groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layouts = [LAYOUTS[int(rng.integers(len(LAYOUTS)))] for _ in rows]
    pairs = zip(layouts, rows, strict=True)
    shapes = {f"{i}": (layout, count, 32 * groups) for i, (layout, count) in enumerate(pairs)}
    case = make(shapes, seed)
    x = inputs(num, 32 * groups, seed)
    for name, result in zip(shapes, case.products(list(shapes), x), strict=True):
        assert_products(case, name, x, result)


def test_layouts_are_chosen_at_run_time_inside_a_scan() -> None:
    layouts = [QUANTISED[0], DENSE[1], QUANTISED[-1], QUANTISED[5]]
    case = make(
        {f"{kind}{i}": (layout, 40, 64) for kind in "ab" for i, layout in enumerate(layouts)}
        | {f"b{i}": (layout, 24, 64) for i, layout in enumerate(reversed(layouts))}
    )
    first, second = case.stack("a0", "a1", "a2", "a3"), case.stack("b0", "b1", "b2", "b3")
    assert len(first.layouts) == 4
    x, ids = inputs(3, 64), jnp.array([39, 0], jnp.int32)

    @jitted
    def all_of(
        arena: jax.Array, stacks: tuple[MatrixStack, MatrixStack], x: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def layer(
            carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
            pair: tuple[MatrixStack, MatrixStack],
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            i, a, b, rows = carry
            one, other = qmatmul.qmatmuls(arena, pair, x)
            return (
                i + 1,
                a.at[i].set(one),
                b.at[i].set(other),
                rows.at[i].set(gather_rows(arena, pair[0], ids)),
            )

        start = (
            jnp.int32(0),
            jnp.zeros((4, 3, 40)),
            jnp.zeros((4, 3, 24)),
            jnp.zeros((4, 2, 64)),
        )
        return flow.scan(layer, start, stacks)[1:]

    one, other, rows = all_of(case.arena, (first, second), jnp.asarray(x))
    for i in range(4):
        assert_products(case, f"a{i}", x, np.asarray(one[i]))
        assert_products(case, f"b{i}", x, np.asarray(other[i]))
        np.testing.assert_array_equal(rows[i], case.packed.values[f"a{i}"][[39, 0]])


@pytest.mark.parametrize("layout", LAYOUTS, ids=label)
def test_gathered_rows_are_the_decoded_rows_exactly(every_layout: Case, layout: Layout) -> None:
    shapes = SHAPES if layout.kind != "dense" else [*SHAPES, *ODD_SHAPES]
    for shape in shapes:
        name = named(layout, *shape)
        values = every_layout.packed.values[name]
        ids = np.array([0, len(values) - 1, len(values) // 2, 0], np.int32)
        rows = gather(every_layout.arena, every_layout.one(name), jnp.asarray(ids))
        np.testing.assert_array_equal(rows, values[ids])


def entry(case: Case, name: str) -> list[int]:
    matrix = case.packed.matrices[name]
    return [0, matrix.codes_block, matrix.scales_block or 0, matrix.offsets_block or 0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 1, "layout that does not exist"),
        (0, -1, "layout that does not exist"),
        (1, 10**6, "not inside the arena"),
        (1, -1, "not inside the arena"),
        (2, 10**6, "not inside the arena"),
        (3, 2**31 - 1, "not inside the arena"),
    ],
)
def test_an_entry_that_names_no_matrix_is_refused(column: int, value: int, message: str) -> None:
    layout = QUANTISED[0]
    case = make({"w": (layout, 20, 64)})
    bad = entry(case, "w")
    bad[column] = value
    x, table = jnp.asarray(inputs(2, 64)), jnp.array([bad], jnp.int32)
    with pytest.raises(REFUSALS, match=message):
        native.qmatmul(case.arena, table, x, [20], [layout]).block_until_ready()
    marks = jnp.zeros(3, jnp.int32)
    with pytest.raises(REFUSALS, match="shapes differ"):
        native.qmatmul(case.arena, table, x, [20], [layout], live=marks).block_until_ready()
    ids = jnp.array([0], jnp.int32)
    with pytest.raises(REFUSALS, match=message):
        native.gather_rows(case.arena, table[0], ids, 64, [layout]).block_until_ready()


@pytest.mark.parametrize("row", [-1, -(2**31), 64, 2**31 - 1])
def test_a_row_outside_the_arena_is_refused(row: int) -> None:
    layout = QUANTISED[0]
    case = make({"w": (layout, 20, 64)})
    ids, place = jnp.array([0, row], jnp.int32), jnp.array(entry(case, "w"), jnp.int32)
    with pytest.raises(REFUSALS, match=r"row is negative|not inside the arena"):
        native.gather_rows(case.arena, place, ids, 64, [layout]).block_until_ready()


def test_columns_that_fill_no_group_of_activations_are_refused() -> None:
    layout = replace(QUANTISED[0], group=16)
    case = make({"w": (layout, 16, 48)})
    with pytest.raises(REFUSALS, match="does not fit its layout"):
        case.product("w", inputs(2, 48))


def test_no_rows_at_all_are_no_work(every_layout: Case) -> None:
    name = named(QUANTISED[0], 17, 96)
    assert every_layout.product(name, inputs(0, 96)).shape == (0, 17)
