"""Arenas of matrices in any layout, tiled or not, with the values that the layout gives them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.gguf.arena import Matrix
from engine.gguf.encode import Planes
from engine.gguf.layouts import BLOCK_BYTES, Layout
from engine.gguf.tiles import tile_planes
from tests.unit.engine.gguf.planes import FloatArray, decode_rows

QUANTISED: list[Layout] = [
    Layout(kind, group=group, scale_dtype=scale, has_offset=has_offset, is_tiled=True)
    for kind, group, scale, has_offset in itertools.product(
        ("q4", "q8"), (16, 32), ("f16", "f32"), (False, True)
    )
]
DENSE = [Layout("dense", dtype=dtype) for dtype in ("f32", "f16", "bf16")]


def label(layout: Layout) -> str:
    """A layout in a word, for test ids."""
    parts = (layout.kind, layout.dtype, layout.group, layout.scale_dtype)
    words = [str(part) for part in parts if part is not None]
    return "-".join([*words, "offset"] if layout.has_offset else words)


@dataclass(frozen=True)
class Packed:
    """Matrices by name in one arena, uint8 [blocks, 64], and as float32 [rows, cols]."""

    data: npt.NDArray[np.uint8]
    matrices: Mapping[str, Matrix]
    values: Mapping[str, FloatArray]


def random_planes(rng: np.random.Generator, layout: Layout, rows: int, cols: int) -> Planes:
    """Rows that use every code, with values of about one over the root of `cols`."""
    spread = np.float32(cols**-0.5)
    if layout.group is None:
        values = rng.standard_normal((rows, cols), np.float32) * spread
        if layout.dtype == "bf16":
            codes = np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        else:
            codes = values.astype("f2" if layout.dtype == "f16" else "f4").view(np.uint8)
        return Planes(codes[:, None])
    groups = cols // layout.group
    bytes_per_group = layout.group // (2 if layout.kind == "q4" else 1)
    codes = rng.integers(0, 256, (rows, groups, bytes_per_group), np.uint8)
    most = 8 if layout.kind == "q4" else 128
    scales = rng.uniform(-1, 1, (rows, groups)) * spread / most
    offsets = rng.standard_normal((rows, groups)) * spread if layout.has_offset else None
    dtype = "f2" if layout.scale_dtype == "f16" else "f4"
    return Planes(codes, scales.astype(dtype), None if offsets is None else offsets.astype(dtype))


def pack(planes: Mapping[str, tuple[Layout, Planes]]) -> Packed:
    """Lays matrices out one after another, each plane on a block, and ends with the last.

    Nothing follows the last plane, so that what reads past it reads past the array.
    """
    blocks: list[npt.NDArray[np.uint8]] = []
    matrices: dict[str, Matrix] = {}
    values: dict[str, FloatArray] = {}
    next_block = 0
    for name, (layout, rows_of) in planes.items():
        rows = len(rows_of.codes)
        flat = rows_of.codes.reshape(rows, -1)
        values[name] = decode_rows(layout, flat, rows_of.scales, rows_of.offsets)
        cols = values[name].shape[1]
        places: list[int | None] = []
        stored = tile_planes(layout, rows_of) if layout.is_tiled else rows_of
        for plane, length in zip(stored, layout.plane_blocks(rows, cols), strict=True):
            places.append(next_block if length else None)
            if plane is None:
                continue
            block = np.zeros(length * BLOCK_BYTES, np.uint8)
            block[: plane.nbytes] = np.ascontiguousarray(plane).view(np.uint8).ravel()
            blocks.append(block)
            next_block += length
        codes, scales, offsets = places
        assert codes is not None
        matrices[name] = Matrix(name, rows, cols, layout, codes, scales, offsets)
    return Packed(np.concatenate(blocks).reshape(-1, BLOCK_BYTES), matrices, values)


def random_matrices(seed: int, shapes: Mapping[str, tuple[Layout, int, int]]) -> Packed:
    """Random matrices by name."""
    rng = np.random.default_rng(seed)
    return pack({n: (layout, random_planes(rng, layout, *s)) for n, (layout, *s) in shapes.items()})
