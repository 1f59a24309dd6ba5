"""Quantised products and gathers on plain XLA: activations stay f32, any backend runs them.

Decoding goes in row pieces of about `_PIECE_BYTES`, which stay in a core's cache: XLA's CPU backend
has no fused dequantise-and-multiply, and a weight-sized temporary costs far more than the product.
Three habits of that backend shape the code (measured, docs/benchmarks.md): a slice of the arena
that is fused into the decoding keeps it from being vectorised, hence the piece in the loop's carry;
so does putting a group's nibbles back in order, hence the split product; a dot with one row is
compiled as a scalar loop, hence at least two rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from engine.gguf.layouts import BLOCK_BYTES, ROW_MULTIPLE, Layout, padded_rows
from engine.kernels import flow

_PIECE_BYTES = 1 << 18


def matmul(
    layout: Layout,
    rows: int,
    cols: int,
    arena: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    offsets: jax.Array,
    x: jax.Array,
) -> jax.Array:
    """Returns `x @ W.T`, f32 [N, rows], of the matrix whose planes start at these blocks."""
    padded = padded_rows(rows)
    num_rows = x.shape[0]
    piece = _piece_rows(padded, cols, num_rows)
    num_pieces = padded // piece
    if num_rows == 1:
        x = jnp.pad(x, ((0, 1), (0, 0)))

    def read(i: jax.Array | int) -> list[jax.Array]:
        return _read_planes(layout, piece, cols, arena, (codes, scales, offsets), i * piece)

    def body(i: jax.Array, carry: tuple[list[jax.Array], jax.Array]):
        planes, out = carry
        y = _decoded_product(layout, piece, cols, planes, x)
        out = lax.dynamic_update_slice(out, y, (0, i * piece))
        return read(jnp.minimum(i + 1, num_pieces - 1)), out

    start = (read(0), jnp.zeros((x.shape[0], padded), jnp.float32))
    return flow.fori_loop(0, num_pieces, body, start)[1][:num_rows, :rows]


def _piece_rows(padded: int, cols: int, num_rows: int) -> int:
    """Rows of a piece: the largest divisor of `padded`, in row multiples, that is small enough.

    Every piece packs x anew, so a piece has at least as many rows as x.
    """
    multiples = padded // ROW_MULTIPLE
    wanted = max(1, max(_PIECE_BYTES // (4 * cols), num_rows) // ROW_MULTIPLE)
    return max(d for d in range(1, min(multiples, wanted) + 1) if multiples % d == 0) * ROW_MULTIPLE


def _plane_row_bytes(layout: Layout, cols: int) -> tuple[int, ...]:
    """Bytes of a row of each plane that the layout has: codes, then scales, then offsets."""
    codes, scales = layout.code_row_bytes(cols), layout.scale_row_bytes(cols)
    if not scales:
        return (codes,)
    return (codes, scales, scales) if layout.has_offset else (codes, scales)


def _read_planes(
    layout: Layout,
    rows: int,
    cols: int,
    arena: jax.Array,
    first_blocks: tuple[jax.Array, jax.Array, jax.Array],
    first_row: jax.Array | int,
) -> list[jax.Array]:
    """The bytes of `rows` rows from `first_row` on, one uint8 [rows, row bytes] per plane."""
    planes: list[jax.Array] = []
    for first_block, row_bytes in zip(first_blocks, _plane_row_bytes(layout, cols), strict=False):
        blocks = rows * row_bytes // BLOCK_BYTES
        # Pieces start at a multiple of ROW_MULTIPLE, where every plane is on a block.
        skip = first_row // ROW_MULTIPLE * (ROW_MULTIPLE * row_bytes // BLOCK_BYTES)
        piece = lax.dynamic_slice(arena, (first_block + skip, 0), (blocks, BLOCK_BYTES))
        planes.append(piece.reshape(rows, row_bytes))
    return planes


def _decoded_product(
    layout: Layout, rows: int, cols: int, planes: list[jax.Array], x: jax.Array
) -> jax.Array:
    if layout.kind != "q4" or layout.group is None:
        return x @ _decode(layout, rows, cols, planes).T
    # The columns of x are split as the nibbles are.
    num, groups, half = x.shape[0], cols // layout.group, layout.group // 2
    codes = planes[0].reshape(rows, groups, half).astype(jnp.int32)
    scale = _as_float(planes[1], layout.scale_dtype).reshape(rows, groups, 1)
    low = ((codes & 15).astype(jnp.float32) * scale).reshape(rows, groups * half)
    high = ((codes >> 4).astype(jnp.float32) * scale).reshape(rows, groups * half)
    parts = x.reshape(num, groups, 2, half)
    out = parts[:, :, 0].reshape(num, -1) @ low.T + parts[:, :, 1].reshape(num, -1) @ high.T
    if layout.has_offset:
        out += parts.sum((2, 3)) @ _as_float(planes[2], layout.scale_dtype).T
    return out


def _decode(layout: Layout, rows: int, cols: int, planes: list[jax.Array]) -> jax.Array:
    """Planes of `rows` rows to f32 [rows, cols]."""
    if layout.group is None:
        return _as_float(planes[0], layout.dtype)
    groups = cols // layout.group
    if layout.kind == "q4":
        nibbles = planes[0].reshape(rows, groups, layout.group // 2)
        codes = jnp.concatenate([nibbles & 15, nibbles >> 4], -1).astype(jnp.float32)
    else:
        signed = lax.bitcast_convert_type(planes[0], jnp.int8)
        codes = signed.reshape(rows, groups, layout.group).astype(jnp.float32)
    values = codes * _as_float(planes[1], layout.scale_dtype)[..., None]
    if layout.has_offset:
        values += _as_float(planes[2], layout.scale_dtype)[..., None]
    return values.reshape(rows, cols)


_FLOATS = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}


def _as_float(raw: jax.Array, dtype: str | None) -> jax.Array:
    """Reinterprets uint8 [rows, n * size] as f32 [rows, n]; the layout has a `dtype` here."""
    assert dtype is not None
    kind = _FLOATS[dtype]
    size = np.dtype(kind).itemsize
    grouped = raw.reshape(raw.shape[0], -1, size)
    return lax.bitcast_convert_type(grouped, kind).astype(jnp.float32)


def gather(
    layout: Layout,
    cols: int,
    arena: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    offsets: jax.Array,
    row_ids: jax.Array,
) -> jax.Array:
    """Returns rows of such a matrix decoded to f32 [N, cols]; `row_ids` is int32 [N], in range."""
    planes = [
        _gather_bytes(arena, first_block, row_bytes, row_ids)
        for first_block, row_bytes in zip(
            (codes, scales, offsets), _plane_row_bytes(layout, cols), strict=False
        )
    ]
    return _decode(layout, row_ids.shape[0], cols, planes)


def _gather_bytes(
    arena: jax.Array, first_block: jax.Array, row_bytes: int, row_ids: jax.Array
) -> jax.Array:
    """uint8 [N, row_bytes]: rows of a plane whose rows need not start on a block.

    The byte offset of a row is split before it is multiplied: `row * row_bytes` can pass 2**31.
    """
    whole, rest = divmod(row_bytes, BLOCK_BYTES)
    start = row_ids * rest
    block = first_block + row_ids * whole + start // BLOCK_BYTES
    byte = (start % BLOCK_BYTES)[:, None] + jnp.arange(row_bytes, dtype=jnp.int32)
    return arena[block[:, None] + byte // BLOCK_BYTES, byte % BLOCK_BYTES]
