"""Rows of planes to tiles: the interleaved order that the native kernels read.

Pure; the order itself is described in `layouts`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf.encode import Planes
from engine.gguf.layouts import TILE_ROWS, Layout, super_blocks

_SIGN = np.uint8(0x80)  # flipped, it adds 128 to a signed code


def tile_planes(layout: Layout, planes: Planes) -> Planes:
    """Interleaves some rows, the first of which starts a tile; a short last tile is filled up.

    Args:
        layout: A tiled layout.
        planes: Rows as `engine.gguf.encode.encode_rows` returns them.

    Returns:
        codes uint8 [tiles, groups, bytes], scales and offsets uint8 [tiles, bytes].
    """
    codes = planes.codes ^ _SIGN if layout.kind == "q8" else planes.codes
    tiles = _by_tile(codes)  # [tiles, rows, groups, bytes]
    num_tiles, _, groups, group_bytes = tiles.shape
    # Four columns are moved as one number: numpy copies short runs several times slower.
    runs = np.ascontiguousarray(tiles).view(np.uint32)
    columns = np.ascontiguousarray(runs.transpose(0, 2, 3, 1)).view(np.uint8)
    interleaved = columns.reshape(num_tiles, groups, TILE_ROWS * group_bytes)
    scales, offsets = (_tile_numbers(layout, plane, groups) for plane in planes[1:])
    return Planes(interleaved, scales, offsets)


def _tile_numbers(
    layout: Layout, numbers: npt.NDArray[Any] | None, groups: int
) -> npt.NDArray[np.uint8] | None:
    if numbers is None:
        return None
    if layout.scale_dtype != "f16x8":
        return _bytes(_by_tile(numbers))
    assert layout.group is not None
    middle = 2 * super_blocks(groups * layout.group)
    factors = np.ascontiguousarray(numbers[:, :middle]).view(np.float16)
    return np.concatenate(
        [_bytes(_by_tile(factors)), _bytes(_by_tile(numbers[:, middle:]))], axis=1
    )


def _bytes(tiles: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[tiles, rows, groups] to bytes [tiles, ...], groups outside."""
    return np.ascontiguousarray(tiles.transpose(0, 2, 1)).view(np.uint8).reshape(len(tiles), -1)


def _by_tile(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[rows, ...] to [tiles, TILE_ROWS, ...], zeros for the rows that are missing."""
    missing = -len(rows) % TILE_ROWS
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(-1, TILE_ROWS, *rows.shape[1:])
