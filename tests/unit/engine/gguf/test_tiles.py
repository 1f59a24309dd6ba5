"""Tiles against their definition, element by element, and in an arena against plain rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.gguf import arena as arena_module
from engine.gguf.arena import Matrix, build_arena, plan_arena
from engine.gguf.encode import Planes
from engine.gguf.layouts import BLOCK_BYTES, TILE_ROWS, Layout, layout_for, padded_rows
from engine.gguf.reader import GgufFile
from engine.gguf.tiles import tile_planes
from tests.ggufs import random_blocks, write_gguf
from tests.unit.engine.gguf.planes import TABLES, wide
from tests.unit.engine.kernels.matrices import QUANTISED, label, random_planes

GROUPED = [t for t in Type if (layout := layout_for(t)) is not None and layout.kind != "dense"]
COLS = 512

Number = npt.NDArray[Any]


def code_at(layout: Layout, tile: Number, row: int, group: int, column: int) -> int:
    """One code of a tile, uint8 [groups, bytes], by the table of `engine.gguf.layouts`."""
    assert layout.group is not None
    half = layout.group // 2
    place = column % half if layout.is_packed else column
    run, byte = divmod(place, 4)
    stored = int(tile[group, 64 * run + 4 * row + byte])
    if layout.kind == "q8":
        return stored - 128
    return stored & 15 if column < half else stored >> 4


def row_code(layout: Layout, codes: Number, row: int, group: int, column: int) -> int:
    """The same code where rows lie one after another."""
    assert layout.group is not None
    if layout.kind == "q8":
        return int(codes[row, group].view(np.int8)[column])
    half = layout.group // 2
    byte = int(codes[row, group, column % half])
    return byte & 15 if column < half else byte >> 4


@pytest.mark.parametrize("layout", QUANTISED, ids=label)
@pytest.mark.parametrize("rows", [1, 15, 16, 37])
def test_each_element_lies_where_the_definition_says(layout: Layout, rows: int) -> None:
    assert layout.group is not None
    planes = random_planes(np.random.default_rng(rows), layout, rows, 64)
    tiled = tile_planes(layout, planes)
    num_tiles, groups = -(-rows // TILE_ROWS), 64 // layout.group
    group_bytes = planes.codes.shape[2] * TILE_ROWS
    assert tiled.codes.shape == (num_tiles, groups, group_bytes)
    assert tiled.codes.dtype == np.uint8
    for row, group, column in np.ndindex(rows, groups, layout.group):
        tile = tiled.codes[row // TILE_ROWS]
        found = code_at(layout, tile, row % TILE_ROWS, group, column)
        assert found == row_code(layout, planes.codes, row, group, column)
    for plane, numbers in ((tiled.scales, planes.scales), (tiled.offsets, planes.offsets)):
        if numbers is None:
            assert plane is None
            continue
        assert plane is not None
        assert plane.shape == (num_tiles, TILE_ROWS * layout.scale_row_bytes(64))
        expected = wide(layout, numbers, groups)
        for row, group in np.ndindex(rows, groups):
            found = number_at(layout, plane[row // TILE_ROWS], groups, row % TILE_ROWS, group)
            assert found == expected[row, group]


def number_at(layout: Layout, tile: Number, groups: int, row: int, group: int) -> np.float32:
    """A scale or offset of a tile, uint8 [bytes], by the table of `engine.gguf.layouts`."""
    assert layout.group is not None
    place = group * TILE_ROWS + row
    if layout.scale_dtype == "f16":
        return np.float32(tile.view(np.float16)[place])
    if layout.scale_dtype == "e8":
        return np.float32(2.0 ** (int(tile[place]) - 128))
    block = group * layout.group // 256 * TILE_ROWS + row
    of_block = tile[: tile.size - groups * TILE_ROWS].view(np.float16)[block]
    of_group = tile[tile.size - groups * TILE_ROWS :].view(np.int8)[place]
    return np.float32(of_block) * np.float32(of_group)


@pytest.mark.parametrize("layout", QUANTISED, ids=label)
def test_rows_that_a_short_last_tile_lacks_are_zero(layout: Layout) -> None:
    assert layout.group is not None
    tiled = tile_planes(layout, random_planes(np.random.default_rng(0), layout, 19, 32))
    for row in range(3, TILE_ROWS):
        for plane in (tiled.scales, tiled.offsets):
            assert plane is None or not any(
                zero_at(layout, plane[1], row, group) for group in range(32 // layout.group)
            )
        for group, column in np.ndindex(32 // layout.group, layout.group):
            assert code_at(layout, tiled.codes[1], row, group, column) in (0, -128)


def zero_at(layout: Layout, tile: Number, row: int, group: int) -> bool:
    """Whether a number that should be zero is not; an e8 one is a zero byte."""
    if layout.scale_dtype == "e8":
        return bool(tile[group * TILE_ROWS + row])
    assert layout.group is not None
    return bool(number_at(layout, tile, 32 // layout.group, row, group))


def decode_tiles(data: Number, matrix: Matrix) -> npt.NDArray[np.float32]:
    """A whole tiled matrix of an arena, padding rows included, element by element of a column."""
    layout, rows = matrix.layout, padded_rows(matrix.rows)
    assert layout.group is not None
    groups, num_tiles = matrix.cols // layout.group, rows // TILE_ROWS

    def plane(first_block: int | None, dtype: str, count: int) -> Number:
        assert first_block is not None
        start = first_block * BLOCK_BYTES
        size = count * np.dtype(dtype).itemsize
        return data.reshape(-1)[start : start + size].view(dtype)

    group_bytes = TILE_ROWS * layout.group // (2 if layout.is_packed else 1)
    codes = plane(matrix.codes_block, "u1", num_tiles * groups * group_bytes)
    # [tiles, groups, runs, rows, 4] as it lies.
    runs = codes.reshape(num_tiles, groups, -1, TILE_ROWS, 4)
    by_row = runs.transpose(0, 3, 1, 2, 4).reshape(rows, groups, -1)
    if layout.is_packed:
        nibbles = np.concatenate([by_row & 15, by_row >> 4], -1)
        numbers = TABLES.get(layout.kind, np.arange(16, dtype=np.float32))[nibbles]
    else:
        numbers = by_row.astype(np.float32) - 128

    def factors(first_block: int | None) -> Number:
        count = rows * layout.scale_row_bytes(matrix.cols)
        tiles = plane(first_block, "u1", count).reshape(num_tiles, -1)
        found = np.empty((rows, groups, 1), np.float32)
        for row, group in np.ndindex(rows, groups):
            tile, lane = divmod(row, TILE_ROWS)
            found[row, group] = number_at(layout, tiles[tile], groups, lane, group)
        return found

    values = factors(matrix.scales_block) * numbers
    if layout.has_offset:
        values = values + factors(matrix.offsets_block)
    return values.reshape(rows, matrix.cols)


@pytest.mark.parametrize("rows", [1, 16, 37, 70])
def test_every_grouped_type_decodes_to_its_reference_after_loading(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of one tile, so that most matrices take several.
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", 2000)
    rng = np.random.default_rng(3)
    tensors: dict[str, tuple[Number, Type]] = {
        t.name: (random_blocks(rng, t, (rows, COLS)), t) for t in GROUPED
    }
    path = write_gguf(tmp_path / "types.gguf", tensors=tensors)
    with GgufFile.open(path) as file:
        arena = build_arena(file, [t.name for t in GROUPED], tiled=True)
        for t in GROUPED:
            matrix = arena.matrices[t.name]
            assert matrix.layout.is_tiled
            values = decode_tiles(arena.data, matrix)
            reference = quants.dequantize(file.raw(t.name).reshape(rows, -1), t)
            np.testing.assert_array_equal(values[:rows], reference, err_msg=t.name)
            assert not values[rows:].any(), f"{t.name}: padding rows are zero"


def test_a_plan_is_hardly_larger_than_the_file_and_dense_matrices_stay_rows(tmp_path: Path) -> None:
    types = [Type.Q4_1, Type.F16, Type.Q6_K, Type.F32]
    rng = np.random.default_rng(1)
    tensors: dict[str, tuple[Number, Type]] = {
        t.name: (random_blocks(rng, t, (37, COLS)), t) for t in types
    }
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", tensors=tensors)) as file:
        names = [t.name for t in types]
        plain, tiled = plan_arena(file, names), plan_arena(file, names, tiled=True)
        raw = file.raw("F16").reshape(37, -1).copy()
        arena = build_arena(file, names, tiled=True)
    assert tiled.nbytes < plain.nbytes
    assert [m.layout.is_tiled for m in tiled.matrices.values()] == [True, False, True, False]
    start = tiled.matrices["F16"].codes_block * BLOCK_BYTES
    stored = arena.data.reshape(-1)[start : start + raw.nbytes]
    np.testing.assert_array_equal(stored, raw.ravel())


def test_planes_are_not_changed_by_tiling() -> None:
    layout = QUANTISED[-1]
    planes = random_planes(np.random.default_rng(0), layout, 16, 32)
    before = Planes(*(None if plane is None else plane.copy() for plane in planes))  # pyright: ignore[reportArgumentType] -- codes are never None
    tile_planes(layout, planes)
    for plane, copy in zip(planes, before, strict=True):
        if plane is not None and copy is not None:
            np.testing.assert_array_equal(plane, copy)
