"""Products with quantised matrices that live in the arena: one interface, two implementations.

A matrix is never an array of its own. Programs receive the arena (uint8 [blocks, 64]) and, per
matrix, the first block of each plane; a stack of L matrices of one shape holds L such offsets, so
that a scan over layers copies no weight. Stacked matrices may differ in layout: then each product
selects its layout at run time. A matrix may itself be many of one shape, at equal distances, of
which each row of the input takes its own (`expert_products`). A matrix laid out for the native
kernels is multiplied by them, any other by XLA. This module knows no model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from engine.gguf.arena import Matrix
from engine.gguf.layouts import Layout
from engine.kernels import expert_groups, flow, native, xla
from engine.kernels.lora import Changes, adapt


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["place"],
    meta_fields=["rows", "cols", "layouts", "count", "is_native"],
)
@dataclass(frozen=True)
class MatrixStack:
    """Where same-shaped matrices lie: int32 [L, 5], or int32 [5] for one matrix.

    The five are `kind`, which indexes `layouts`, the arena block numbers of codes, scales and
    offsets (0 where a layout lacks that plane) and `stride`. `is_native`: the native kernels
    multiply it. Where each entry is `count` matrices, the blocks are the first one's, and `stride`
    is the blocks from one to the next. One array, because each argument of a program costs every
    call of it some microseconds.
    """

    place: jax.Array
    rows: int
    cols: int
    layouts: tuple[Layout, ...]
    count: int = 1
    is_native: bool = False

    @staticmethod
    def of(matrices: Sequence[Matrix], *, is_native: bool = False) -> MatrixStack:
        """Stacks matrices of one shape, in order.

        Raises:
            ValueError: The shapes differ.
        """
        shapes = {(m.count, m.rows, m.cols) for m in matrices}
        if len(shapes) != 1:
            raise ValueError(f"stacked matrices differ in shape: {sorted(shapes)}")
        layouts = tuple(dict.fromkeys(m.layout for m in matrices))
        table = np.array(
            [
                [
                    layouts.index(m.layout),
                    m.codes_block,
                    m.scales_block or 0,
                    m.offsets_block or 0,
                    m.stride_blocks,
                ]
                for m in matrices
            ],
            np.int32,
        )
        ((count, rows, cols),) = shapes
        # Nothing is compiled for it, as an operation would be for each shape.
        place = jax.device_put(table, may_alias=False)
        return MatrixStack(place, rows, cols, layouts, count, is_native)

    def single(self) -> MatrixStack:
        """The only matrix of a stack of one."""
        return dataclasses.replace(
            self, place=jax.device_put(np.asarray(self.place)[0], may_alias=False)
        )

    @property
    def kind(self) -> jax.Array:
        """Which of `layouts` it has."""
        return self.place[..., 0]

    @property
    def planes(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First blocks of codes, scales and offsets."""
        return self.place[..., 1], self.place[..., 2], self.place[..., 3]

    @property
    def stride(self) -> jax.Array:
        """Blocks from one of `count` matrices to the next."""
        return self.place[..., 4]

    def moved(self, num_blocks: jax.Array) -> MatrixStack:
        """The matrix that lies so many blocks behind it."""
        planes = np.array([0, 1, 1, 1, 0], np.int32)
        return dataclasses.replace(self, place=self.place + num_blocks * planes)

    def entry(self, first_kind: int) -> jax.Array:
        """`place` where its layouts are listed from `first_kind` on."""
        return self.place + np.array([first_kind, 0, 0, 0, 0], np.int32)


def qmatmuls(
    arena: jax.Array,
    matrices: Sequence[MatrixStack],
    x: jax.Array,
    *,
    live: jax.Array | None = None,
    is_fine: bool = False,
    changes: Changes | None = None,
) -> list[jax.Array]:
    """Returns `x @ W.T` for several matrices with one input.

    Args:
        arena: uint8 [blocks, 64].
        matrices: Single matrices of the same `cols`.
        x: f32 [N, cols]; the native kernels quantise it once, to 8 bit in groups of 32.
        live: int32 [N], negative for rows of padding, whose products mean nothing; None: all count.
        is_fine: Whether native kernels take 16 bits instead, at nearly twice the arithmetic.
        changes: What adapters add, in banks that are native if the matrices are.

    Returns:
        f32 [N, rows] each.
    """
    if not all(matrix.is_native for matrix in matrices):
        products = [_xla_product(arena, matrix, x) for matrix in matrices]
        return products if changes is None else adapt(changes, x, products)
    layouts: list[Layout] = []
    entries: list[jax.Array] = []
    for matrix in matrices:
        entries.append(matrix.entry(len(layouts))[:4])
        layouts += matrix.layouts
    rows = [matrix.rows for matrix in matrices]
    y = native.qmatmul(
        arena,
        jnp.stack(entries),
        x,
        rows,
        layouts,
        live=live,
        is_fine=is_fine,
        changes=None if changes is None else changes.arrays,
    )
    return jnp.split(y, np.cumsum(rows)[:-1].tolist(), axis=-1)


def qmatmul(
    arena: jax.Array,
    matrix: MatrixStack,
    x: jax.Array,
    *,
    live: jax.Array | None = None,
    changes: Changes | None = None,
) -> jax.Array:
    """Returns `x @ W.T` for one matrix, see `qmatmuls`."""
    return qmatmuls(arena, [matrix], x, live=live, changes=changes)[0]


def expert_products(
    arena: jax.Array, stacks: Sequence[MatrixStack], x: jax.Array, ids: jax.Array
) -> list[jax.Array]:
    """Multiplies each row by matrices of its own: `x[n] @ W[ids[n, k]].T`, for several stacks.

    Only the matrices that some row names are read.

    Args:
        arena: uint8 [blocks, 64].
        stacks: Single entries of the same `count` and `cols`.
        x: f32 [N, cols].
        ids: int32 [N, K], in range.

    Returns:
        f32 [N, K, rows] each.
    """
    num, used = ids.shape
    if all(stack.is_native for stack in stacks):
        table, layouts = stack_table(stacks)
        rows = [stack.rows for stack in stacks]
        y = native.expert_products(arena, table, x, ids, rows, layouts, stacks[0].count)
        parts = jnp.split(y, np.cumsum(rows)[:-1].tolist(), axis=-1)
    else:
        grouping = expert_groups.group(ids.reshape(-1), stacks[0].count)
        grouped = grouping.gather(jnp.repeat(x, used, axis=0))
        parts = [_grouped_product(arena, stack, grouping, grouped) for stack in stacks]
    return [part.reshape(num, used, part.shape[-1]) for part in parts]


def stack_table(stacks: Sequence[MatrixStack]) -> tuple[jax.Array, list[Layout]]:
    """What native products of stacks take: int32 [stacks, 5], and the layouts that it indexes."""
    layouts: list[Layout] = []
    entries: list[jax.Array] = []
    for stack in stacks:
        entries.append(stack.entry(len(layouts)))
        layouts += stack.layouts
    return jnp.stack(entries), layouts


def _grouped_product(
    arena: jax.Array, stack: MatrixStack, grouping: expert_groups.Grouping, x: jax.Array
) -> jax.Array:
    """The product of rows in `grouping`'s order, put back into the order of its pairs."""
    size = grouping.block_rows

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        skip = grouping.block_expert[i] * stack.stride
        one = stack.moved(skip)
        own = lax.dynamic_slice_in_dim(x, i * size, size)
        return lax.dynamic_update_slice_in_dim(out, _xla_product(arena, one, own), i * size, axis=0)

    start = jnp.zeros((x.shape[0], stack.rows), jnp.float32)
    return grouping.scatter(flow.fori_loop(0, grouping.num_blocks, body, start))


def gather_rows(arena: jax.Array, matrix: MatrixStack, row_ids: jax.Array) -> jax.Array:
    """Returns rows of one matrix decoded to f32 [N, cols]; `row_ids` is int32 [N], in range."""
    if matrix.is_native:
        return native.gather_rows(arena, matrix.place[:4], row_ids, matrix.cols, matrix.layouts)
    branches = [functools.partial(xla.gather, layout, matrix.cols) for layout in matrix.layouts]
    return flow.switch(matrix.kind, branches, arena, *matrix.planes, row_ids)


def _xla_product(arena: jax.Array, matrix: MatrixStack, x: jax.Array) -> jax.Array:
    branches = [
        functools.partial(xla.matmul, layout, matrix.rows, matrix.cols) for layout in matrix.layouts
    ]
    return flow.switch(matrix.kind, branches, arena, *matrix.planes, x)
