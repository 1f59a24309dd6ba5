from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from engine.gguf.arena import Arena, build_arena
from engine.gguf.layouts import ROW_MULTIPLE, layout_for, padded_rows
from engine.gguf.reader import GgufFile
from engine.kernels import flow, qmatmul, xla
from engine.kernels.qmatmul import MatrixStack, gather_rows
from tests.ggufs import random_blocks, write_gguf
from tests.unit.engine.gguf.planes import decode_matrix
from tests.unit.engine.jitted import jitted

# One type per layout: what a matrix was before it came to the arena is forgotten there.
TYPES = list({layout_for(t): t for t in reversed(Type) if layout_for(t) is not None}.values())
# (rows, cols): five pieces of 64 rows; two pieces of 32, one of them mostly padding.
SHAPES = [(300, 512), (33, 2048)]

Float64 = npt.NDArray[np.float64]

matmul = jitted(qmatmul.qmatmul)
gather = jitted(gather_rows)


@jitted
def products(arena: jax.Array, matrices: list[MatrixStack], xs: list[jax.Array]) -> list[jax.Array]:
    """Many products in one program: compiling is what these tests take time for."""
    return [qmatmul.qmatmul(arena, m, x) for m, x in zip(matrices, xs, strict=True)]


@dataclass(frozen=True)
class Case:
    """An arena with matrices by name, on the device and as float64."""

    arena: Arena
    device: jax.Array

    def stack(self, *names: str) -> MatrixStack:
        return MatrixStack.of([self.arena.matrices[name] for name in names])

    def one(self, name: str) -> MatrixStack:
        return self.stack(name).single()

    def values(self, name: str) -> Float64:
        rows = self.arena.matrices[name].rows
        return decode_matrix(self.arena, name)[:rows].astype(np.float64)


def make(folder: Path, shapes: Mapping[str, tuple[Type, int, int]]) -> Case:
    rng = np.random.default_rng(11)
    tensors: dict[str, tuple[npt.NDArray[Any], Type]] = {
        name: (random_blocks(rng, ggml_type, (rows, cols), cols**-0.5), ggml_type)
        for name, (ggml_type, rows, cols) in shapes.items()
    }
    with GgufFile.open(write_gguf(folder / "matrices.gguf", tensors=tensors)) as file:
        arena = build_arena(file, list(shapes))
    return Case(arena, jnp.asarray(arena.data))


@pytest.fixture(scope="module")
def every_layout(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make(
        tmp_path_factory.mktemp("layouts"),
        {f"{t.name} {rows}x{cols}": (t, rows, cols) for t in TYPES for rows, cols in SHAPES},
    )


def assert_product(case: Case, name: str, x: jax.Array, result: jax.Array) -> None:
    """f32 accumulates; a layout with offsets cancels them against codes up to twice as large."""
    weights = case.values(name)
    wide = np.asarray(x).astype(np.float64)
    magnitude = np.abs(wide) @ np.abs(weights).T
    assert result.shape == (len(x), len(weights))
    assert result.dtype == jnp.float32
    error = np.abs(np.asarray(result) - wide @ weights.T)
    assert (error <= 4e-6 * magnitude + 1e-30).all(), f"{(error / magnitude).max():.1e}"


def test_types_cover_every_layout() -> None:
    assert {layout_for(t) for t in TYPES} == {layout_for(t) for t in Type} - {None}


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_products_are_those_of_the_decoded_matrix(every_layout: Case, ggml_type: Type) -> None:
    rng = np.random.default_rng(5)
    names = [f"{ggml_type.name} {rows}x{cols}" for rows, cols in SHAPES]
    # Each number of rows on the matrix of five pieces; the other shapes with three rows.
    pairs = [(names[0], num_rows) for num_rows in (1, 2, 8, 40)] + [(n, 3) for n in names[1:]]
    matrices = [every_layout.one(name) for name, _ in pairs]
    xs = [
        jnp.asarray(rng.standard_normal((num, m.cols), np.float32))
        for (_, num), m in zip(pairs, matrices, strict=True)
    ]
    for (name, _), x, result in zip(
        pairs, xs, products(every_layout.device, matrices, xs), strict=True
    ):
        assert_product(every_layout, name, x, result)


def test_a_row_has_the_same_product_alone_and_among_others(every_layout: Case) -> None:
    matrix = every_layout.one("Q4_0 300x512")
    x = jnp.asarray(np.random.default_rng(1).standard_normal((8, 512), np.float32))
    together = np.asarray(matmul(every_layout.device, matrix, x))
    alone = np.concatenate([matmul(every_layout.device, matrix, x[i : i + 1]) for i in range(8)])
    np.testing.assert_allclose(alone, together, rtol=0, atol=2e-6)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_gathered_rows_are_the_decoded_rows(every_layout: Case, ggml_type: Type) -> None:
    name = f"{ggml_type.name} 33x2048"
    ids = jnp.array([0, 32, 17, 17, 1], jnp.int32)
    rows = np.asarray(gather(every_layout.device, every_layout.one(name), ids))
    expected = every_layout.values(name)[np.asarray(ids)]
    # XLA may fuse the multiplication with the addition: then it rounds once, not twice.
    largest = np.abs(expected).max()
    tolerance = largest * 2.0**-22 if layout_for(ggml_type).has_offset else 0.0  # pyright: ignore[reportOptionalMemberAccess] -- TYPES have one
    np.testing.assert_allclose(rows, expected, rtol=0, atol=tolerance)


def test_rows_that_start_inside_a_block_are_gathered_whole(tmp_path: Path) -> None:
    # 48 bytes of codes and 6 of scales: hardly a row starts on a block of 64.
    case = make(tmp_path, {"w": (Type.Q8_0, 70, 96)})
    rows = np.asarray(gather(case.device, case.one("w"), jnp.arange(70, dtype=jnp.int32)))
    np.testing.assert_array_equal(rows, case.values("w"))


def test_each_matrix_of_a_mixed_stack_takes_the_branch_of_its_layout(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    types = [Type.Q4_0, Type.F16, Type.Q8_0, Type.F16]
    case = make(tmp_path, {n: (t, 40, 64) for n, t in zip(names, types, strict=True)})
    stack = case.stack(*names)
    assert len(stack.layouts) == 3
    x = jnp.asarray(np.random.default_rng(2).standard_normal((2, 64), np.float32))
    ids = jnp.array([39, 0], jnp.int32)

    def all_of(arena: jax.Array, stack: MatrixStack) -> tuple[jax.Array, jax.Array]:
        def layer(
            carry: tuple[int | jax.Array, jax.Array, jax.Array], matrix: MatrixStack
        ) -> tuple[int | jax.Array, jax.Array, jax.Array]:
            i, products, rows = carry
            products = products.at[i].set(qmatmul.qmatmul(arena, matrix, x))
            return i + 1, products, rows.at[i].set(gather_rows(arena, matrix, ids))

        start = (0, jnp.zeros((4, 2, 40)), jnp.zeros((4, 2, 64)))
        return flow.scan(layer, start, stack)[1:]

    results, rows = jitted(all_of)(case.device, stack)
    for i, name in enumerate(names):
        assert_product(case, name, x, results[i])
        np.testing.assert_allclose(rows[i], case.values(name)[np.asarray(ids)], rtol=0, atol=1e-6)


def test_stacked_matrices_have_one_shape(tmp_path: Path) -> None:
    case = make(tmp_path, {"a": (Type.F32, 32, 64), "b": (Type.F32, 64, 64)})
    with pytest.raises(ValueError, match=re.escape("differ in shape: [(1, 32, 64), (1, 64, 64)]")):
        case.stack("a", "b")


@given(
    rows=st.integers(1, 200_000),
    cols=st.sampled_from([32, 576, 2048, 16384]),
    num_rows=st.integers(1, 2048),
)
def test_pieces_are_small_and_cover_the_rows(rows: int, cols: int, num_rows: int) -> None:
    piece = xla._piece_rows(padded_rows(rows), cols, num_rows)  # pyright: ignore[reportPrivateUsage] -- the bound that the next test relies on
    assert padded_rows(rows) % piece == 0
    assert piece % ROW_MULTIPLE == 0
    assert piece <= max(ROW_MULTIPLE, (1 << 18) // (4 * cols), num_rows)


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [("F32", 1), ("F16", 8), ("Q4_0", 1), ("Q2_K", 8), ("Q8_0", 1), ("Q5_1", 8)],
)
def test_no_temporary_is_as_large_as_the_weights(name: str, num_rows: int) -> None:
    """XLA must never decode a matrix whole, nor copy the arena: 16 MiB here, 12 of them stacked."""
    layout = layout_for(Type[name])
    assert layout is not None
    rows, cols, layers = 4096, 1024, 12
    places: Any = jax.ShapeDtypeStruct((layers, 5), jnp.int32)
    stack = MatrixStack(places, rows, cols, (layout,))
    num_blocks = layers * layout.nbytes(rows, cols) // 64
    arena = jax.ShapeDtypeStruct((num_blocks, 64), jnp.uint8)

    def through_all(arena: jax.Array, stack: MatrixStack, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, matrix: MatrixStack) -> jax.Array:
            return qmatmul.qmatmul(arena, matrix, x)[:, :cols]

        return flow.scan(layer, x, stack)

    x = jax.ShapeDtypeStruct((num_rows, cols), jnp.float32)
    analysis: Any = jax.jit(through_all).lower(arena, stack, x).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 2 << 20
