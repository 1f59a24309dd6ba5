"""Arenas of matrices in any layout, tiled or not, with the values that the layout gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from engine.gguf.arena import Matrix
from engine.gguf.encode import Planes
from engine.gguf.layouts import BLOCK_BYTES, Layout, layout_for, super_blocks
from engine.gguf.tiles import tile_planes
from tests.unit.engine.gguf.planes import FloatArray, decode_rows

QUANTISED: list[Layout] = list(
    dict.fromkeys(
        layout
        for t in Type
        if (layout := layout_for(t, tiled=True)) is not None and layout.kind != "dense"
    )
)
DENSE = [Layout("dense", dtype=dtype) for dtype in ("f32", "f16", "bf16")]


def label(layout: Layout) -> str:
    """A layout in a word, for test ids."""
    parts = (layout.kind, layout.dtype, layout.group, layout.scale_dtype, layout.code_bound)
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
    shape = (rows, groups, layout.group // (2 if layout.is_packed else 1))
    codes = rng.integers(0, 256, shape, np.uint8)
    if not layout.is_packed and layout.code_bound < 128:
        bound = layout.code_bound
        codes = rng.integers(-bound, bound + 1, shape, np.int8).view(np.uint8)
    most = {"q4": 8, "iq4": 128, "mx4": 12}.get(layout.kind, layout.code_bound)
    scales = rng.uniform(-1, 1, (rows, groups)) * spread / most
    offsets = rng.standard_normal((rows, groups)) * spread if layout.has_offset else None
    return Planes(
        codes,
        random_numbers(rng, layout, scales),
        None if offsets is None else random_numbers(rng, layout, offsets),
    )


def random_numbers(
    rng: np.random.Generator, layout: Layout, numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.generic]:
    """Scales or offsets of about these sizes, [rows, groups], in the layout's own form."""
    if layout.scale_dtype == "f16":
        return numbers.astype("f2")
    if layout.scale_dtype == "e8":
        # The scale is half of a power of two.
        return (np.frexp(numbers)[1] + 128).astype(np.uint8)
    assert layout.group is not None
    rows, groups = numbers.shape
    blocks = super_blocks(groups * layout.group)
    of_block = np.full((rows, blocks), np.abs(numbers).max() / 60) * rng.uniform(0.5, 1)
    of_group = rng.integers(-63, 64, (rows, groups), np.int8)
    return np.concatenate([of_block.astype("f2").view(np.uint8), of_group.view(np.uint8)], axis=1)


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
