"""The layouts' own definition, in numpy: what the kernels' results are measured against."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf.arena import Arena
from engine.gguf.layouts import BLOCK_BYTES, Layout

FloatArray = npt.NDArray[np.float32]


def decode_rows(
    layout: Layout,
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[Any] | None,
    offsets: npt.NDArray[Any] | None,
) -> FloatArray:
    """Values of rows: codes uint8 [rows, bytes], scales and offsets as `Planes` has them."""
    rows = len(codes)
    if layout.dtype == "bf16":
        return (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if layout.dtype is not None:
        return codes.view(np.float16 if layout.dtype == "f16" else np.float32).astype(np.float32)
    assert layout.group is not None
    assert scales is not None
    unpacked = codes.size * (2 if layout.is_packed else 1)
    numbers = np.empty((rows, unpacked // rows // layout.group, layout.group), np.float32)
    if not layout.is_packed:
        numbers[:] = codes.view(np.int8).reshape(numbers.shape)
    else:
        table = TABLES.get(layout.kind, np.arange(16))
        half = layout.group // 2
        packed = codes.reshape(rows, -1, half)
        for column in range(half):
            numbers[..., column] = table[packed[..., column] & 15]
            numbers[..., column + half] = table[packed[..., column] >> 4]
    values = wide(layout, scales, numbers.shape[1])[..., None] * numbers
    if offsets is not None:
        values = values + wide(layout, offsets, numbers.shape[1])[..., None]
    return values.reshape(rows, -1)


# Source: ggml-common.h, kvalues_iq4nl and (doubled) kvalues_mxfp4.
TABLES = {
    "iq4": np.array(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
    ),
    "mx4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32),
}


def wide(layout: Layout, numbers: npt.NDArray[Any], groups: int) -> FloatArray:
    """Scales or offsets in float32, [rows, groups]."""
    if layout.scale_dtype == "e8":
        return np.exp2(numbers.astype(np.float64) - 128).astype(np.float32)
    if layout.scale_dtype != "f16x8":
        return numbers.astype(np.float32)
    assert layout.group is not None
    of_group = np.ascontiguousarray(numbers[:, -groups:]).view(np.int8).astype(np.float32)
    of_block = np.ascontiguousarray(numbers[:, :-groups]).view(np.float16).astype(np.float32)
    return of_block[:, np.arange(groups) * layout.group // 256] * of_group


def decode_matrix(arena: Arena, name: str) -> FloatArray:
    """A whole matrix of an arena, padding rows included."""
    matrix = arena.matrices[name]
    layout, rows = matrix.layout, -(-matrix.rows // 32) * 32
    memory = arena.data.reshape(-1)

    def plane(first_block: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        start = first_block * BLOCK_BYTES
        return memory[start : start + rows * row_bytes].reshape(rows, row_bytes)

    def numbers(first_block: int | None) -> npt.NDArray[Any] | None:
        if first_block is None or layout.group is None:
            return None
        dtype = np.dtype(np.float16 if layout.scale_dtype == "f16" else np.float32)
        groups = matrix.cols // layout.group
        return plane(first_block, groups * dtype.itemsize).view(dtype)

    bits = {"q4": 4, "q8": 8, "dense": 32 if layout.dtype == "f32" else 16}[layout.kind]
    codes = plane(matrix.codes_block, matrix.cols * bits // 8)
    return decode_rows(layout, codes, numbers(matrix.scales_block), numbers(matrix.offsets_block))
