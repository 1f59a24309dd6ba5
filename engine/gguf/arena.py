"""All matrices of a model in one array, ready to be handed to a device whole.

`plan_arena` is arithmetic on the tensor table; `build_arena` allocates once and fills matrix after
matrix in row pieces, giving the file's pages back as it goes, so that the model is in memory once.
Which tensors a model has, and what they mean, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from engine.errors import ModelFileError, NotSupported, UnsupportedModel
from engine.gguf.blocks import FloatArray, dequantise
from engine.gguf.encode import Bytes, Planes, all_finite, encode_rows
from engine.gguf.header import TensorInfo
from engine.gguf.layouts import BLOCK_BYTES, TILE_ROWS, Layout, layout_for, padded_rows
from engine.gguf.reader import GgufFile
from engine.gguf.tiles import tile_planes

Progress = Callable[[int, int], None]

_PIECE_BYTES = 1 << 18  # Of the file: temporaries stay within a few MB and inside the L2 cache.


@dataclass(frozen=True)
class Matrix:
    """Where a matrix lies: the first 64-byte block of each of its planes.

    GGUF's orientation: rows are output features (of the embedding: tokens), cols input features.
    `scales_block` and `offsets_block` are None where the layout has no such plane. Of a stack of
    `count` matrices (a tensor of three dimensions) these are the first one's; the planes of each
    following one lie `stride_blocks` further on.
    """

    name: str
    rows: int
    cols: int
    layout: Layout
    codes_block: int
    scales_block: int | None
    offsets_block: int | None
    count: int = 1
    stride_blocks: int = 0

    def member(self, index: int) -> Matrix:
        """One matrix of a stack."""
        skip = index * self.stride_blocks
        return replace(
            self,
            codes_block=self.codes_block + skip,
            scales_block=None if self.scales_block is None else self.scales_block + skip,
            offsets_block=None if self.offsets_block is None else self.offsets_block + skip,
            count=1,
        )


@dataclass(frozen=True)
class ArenaPlan:
    """Where each matrix will lie, and how much that takes."""

    matrices: Mapping[str, Matrix]
    num_blocks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.num_blocks * BLOCK_BYTES


@dataclass(frozen=True, eq=False)
class Arena:
    """The matrices of a model.

    Attributes:
        data: uint8 [num_blocks, 64], C order, its first byte 64-byte aligned in memory.
        matrices: Where each one lies, by tensor name.
    """

    data: Bytes
    matrices: Mapping[str, Matrix]


def plan_arena(file: GgufFile, names: Iterable[str], *, tiled: bool = False) -> ArenaPlan:
    """Lays matrices out one after another, quantised ones tiled if asked.

    Raises:
        ModelFileError: A tensor is missing.
        UnsupportedModel: A tensor is not a matrix, or of a type without a layout.
    """
    matrices: dict[str, Matrix] = {}
    next_block = 0
    for name in names:
        matrix = matrices[name] = plan_matrix(file, name, next_block, tiled=tiled)
        next_block += matrix.count * matrix.stride_blocks
    return ArenaPlan(MappingProxyType(matrices), next_block)


def plan_matrix(file: GgufFile, name: str, first_block: int, *, tiled: bool) -> Matrix:
    """Lays out one tensor, a matrix or a stack of them, from a block on; see `plan_arena`."""
    info = _find(file, name)
    count, rows, cols = _stack_shape(file, info)
    layout = _matrix_layout(file, info, tiled=tiled)
    codes, scales, offsets = layout.plane_blocks(rows, cols)
    return Matrix(
        name,
        rows,
        cols,
        layout,
        codes_block=first_block,
        scales_block=first_block + codes if scales else None,
        offsets_block=first_block + codes + scales if offsets else None,
        count=count,
        stride_blocks=codes + scales + offsets,
    )


def build_arena(
    file: GgufFile,
    names: Iterable[str],
    progress: Progress | None = None,
    *,
    tiled: bool = False,
) -> Arena:
    """Reads matrices into one new arena.

    Args:
        file: The open model; the pages that were read are given back.
        names: The tensors to hold, each once.
        progress: Called after each piece with (bytes of the file done, bytes in all).
        tiled: Interleave quantised matrices for the native kernels.

    Raises:
        ModelFileError: A tensor is missing, or holds a value or scale that is not finite.
        UnsupportedModel: A tensor is not a matrix, of a type without a layout, or memory is out.
    """
    plan = plan_arena(file, names, tiled=tiled)
    arena = Arena(_allocate(plan, file.name), plan.matrices)
    total = sum(file.tensors[name].nbytes for name in plan.matrices)
    done = 0
    for matrix in plan.matrices.values():
        for index in range(matrix.count):
            for piece_bytes in _fill(file, arena.data, matrix.member(index), index):
                done += piece_bytes
                if progress is not None:
                    progress(done, total)
    return arena


def read_arrays(file: GgufFile, names: Iterable[str]) -> dict[str, FloatArray]:
    """Reads small tensors (norms, biases, rope factors, filters) as float32, of any shape.

    Raises:
        ModelFileError: A tensor is missing, or holds a value that is not finite.
        UnsupportedModel: A tensor has a type that is not a float's.
    """
    arrays: dict[str, FloatArray] = {}
    for name in names:
        info = _find(file, name)
        try:
            arrays[name] = dequantise(info.ggml_type, file.raw(name), info.shape)
        except NotSupported as error:
            raise _unsupported(file, info, f"has type {info.ggml_type.name}") from error
        if not np.isfinite(arrays[name]).all():
            raise ModelFileError(
                path=file.name, detail=f"tensor {name!r} has a value that is not finite"
            )
        file.release(name)
    return arrays


def _find(file: GgufFile, name: str) -> TensorInfo:
    info = file.tensors.get(name)
    if info is None:
        raise ModelFileError(path=file.name, detail=f"tensor {name!r} is missing")
    return info


def _unsupported(file: GgufFile, info: TensorInfo, detail: str) -> UnsupportedModel:
    return UnsupportedModel(path=file.name, detail=f"tensor {info.name!r} {detail}")


def _stack_shape(file: GgufFile, info: TensorInfo) -> tuple[int, int, int]:
    """(matrices, rows, columns); a plain matrix is a stack of one."""
    if len(info.shape) not in (2, 3):
        raise _unsupported(
            file, info, f"has shape {info.shape}, expected (rows, columns) or a stack of those"
        )
    *count, rows, cols = info.shape
    return (count[0] if count else 1), rows, cols


def _matrix_layout(file: GgufFile, info: TensorInfo, *, tiled: bool) -> Layout:
    layout = layout_for(info.ggml_type, tiled=tiled)
    if layout is None:
        raise _unsupported(file, info, f"has type {info.ggml_type.name}, which no layout holds")
    return layout


def _allocate(plan: ArenaPlan, file_name: str) -> Bytes:
    try:
        # Zeroed pages come from the kernel one by one as they are first written.
        memory = np.zeros(plan.nbytes + BLOCK_BYTES - 1, np.uint8)
    except MemoryError as error:
        raise UnsupportedModel(
            path=file_name, detail=f"its weights need {plan.nbytes} bytes, memory is out"
        ) from error
    start = -memory.ctypes.data % BLOCK_BYTES
    return memory[start : start + plan.nbytes].reshape(plan.num_blocks, BLOCK_BYTES)


def _fill(file: GgufFile, data: Bytes, matrix: Matrix, index: int) -> Iterable[int]:
    """Encodes matrix `index` of its tensor, yielding the bytes of the file that each piece took."""
    info = file.tensors[matrix.name]
    row_bytes = info.nbytes // math.prod(info.shape[:-1])
    before = index * matrix.rows * row_bytes
    raw = file.raw(matrix.name)[before : before + matrix.rows * row_bytes]
    for first, last in fill_matrix(data, matrix, info.ggml_type, raw, file.name):
        file.release(matrix.name, before + first * row_bytes, before + last * row_bytes)
        yield (last - first) * row_bytes


def fill_matrix(
    data: Bytes, matrix: Matrix, ggml_type: GGMLQuantizationType, raw: Bytes, file_name: str
) -> Iterable[tuple[int, int]]:
    """Encodes a matrix in place, yielding the rows [first, last) that each piece took.

    Args:
        data: uint8 [blocks, 64], written.
        matrix: Where its planes lie in `data`.
        ggml_type: What `raw` holds.
        raw: uint8, the matrix as the file has it.
        file_name: For errors.

    Raises:
        ModelFileError: It holds a value or scale that is not finite.
    """
    rows = raw.reshape(matrix.rows, -1)
    target = _target(data, matrix)
    step = max(TILE_ROWS, _PIECE_BYTES // rows.shape[1] // TILE_ROWS * TILE_ROWS)
    for first in range(0, matrix.rows, step):
        last = min(first + step, matrix.rows)
        piece = encode_rows(ggml_type, matrix.layout, rows[first:last])
        if not all_finite(matrix.layout, piece):
            raise ModelFileError(
                path=file_name,
                detail=f"tensor {matrix.name!r} has a value or a block scale in rows {first} to "
                f"{last - 1} that is not finite in its type",
            )
        if matrix.layout.is_tiled:
            first_tile, piece = first // TILE_ROWS, tile_planes(matrix.layout, piece)
            span = slice(first_tile, first_tile + len(piece.codes))
        else:
            span = slice(first, last)
        for plane, values in zip(target, piece, strict=True):
            if plane is not None and values is not None:
                plane[span] = values
        yield first, last


def _target(data: Bytes, matrix: Matrix) -> Planes:
    """The planes of a matrix as views into the arena, shaped as their rows (or tiles) come."""
    layout = matrix.layout
    groups = 1 if layout.group is None else matrix.cols // layout.group
    rows = padded_rows(matrix.rows)

    def numbers(first_block: int | None) -> npt.NDArray[Any] | None:
        if first_block is None:
            return None
        start, row_bytes = first_block * BLOCK_BYTES, layout.scale_row_bytes(matrix.cols)
        plane = data.reshape(-1)[start : start + rows * row_bytes]
        if layout.is_tiled:
            return plane.reshape(rows // TILE_ROWS, -1)
        dtype = np.float16 if layout.scale_dtype == "f16" else np.float32
        return plane.view(dtype).reshape(rows, groups)

    start, row_bytes = matrix.codes_block * BLOCK_BYTES, layout.code_row_bytes(matrix.cols)
    codes = data.reshape(-1)[start : start + rows * row_bytes]
    codes = codes.reshape(rows // TILE_ROWS if layout.is_tiled else rows, groups, -1)
    return Planes(codes, numbers(matrix.scales_block), numbers(matrix.offsets_block))
