"""Rows of planes to tiles: the interleaved order that the native kernels read.

Pure; the order itself is described in `layouts`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.gguf.encode import Planes
from engine.gguf.layouts import TILE_ROWS, Layout

_SIGN = np.uint8(0x80)  # flipped, it adds 128 to a signed code


def tile_planes(layout: Layout, planes: Planes) -> Planes:
    """Interleaves some rows, the first of which starts a tile; a short last tile is filled up.

    Args:
        layout: A tiled q8 or q4 layout.
        planes: Rows as `engine.gguf.encode.encode_rows` returns them.

    Returns:
        codes uint8 [tiles, groups, bytes], scales and offsets [tiles, groups, TILE_ROWS].
    """
    codes = planes.codes ^ _SIGN if layout.kind == "q8" else planes.codes
    tiles = _by_tile(codes)  # [tiles, rows, groups, bytes]
    num_tiles, _, groups, group_bytes = tiles.shape
    runs = tiles.reshape(num_tiles, TILE_ROWS, groups, group_bytes // 4, 4)
    interleaved = runs.transpose(0, 2, 3, 1, 4).reshape(num_tiles, groups, -1)
    return Planes(interleaved, _interleaved(planes.scales), _interleaved(planes.offsets))


def _interleaved(numbers: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    return None if numbers is None else _by_tile(numbers).transpose(0, 2, 1)


def _by_tile(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[rows, ...] to [tiles, TILE_ROWS, ...], zeros for the rows that are missing."""
    missing = -len(rows) % TILE_ROWS
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(-1, TILE_ROWS, *rows.shape[1:])
