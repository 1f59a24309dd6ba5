"""Rows of GGUF blocks to tiled planes by the native library, several times as fast as numpy.

Only the formats in which experts usually come: whoever waits for one waits for this.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelFileError
from engine.gguf.arena import Bytes, Matrix, fill_matrix
from engine.gguf.layouts import BLOCK_BYTES
from engine.kernels import native

# Of encode.cc.
_FORMATS = {Type.Q8_0: 0, Type.Q4_K: 1, Type.Q6_K: 2, Type.MXFP4: 3}


def fill(data: Bytes, matrix: Matrix, ggml_type: Type, raw: Bytes, file_name: str) -> None:
    """Encodes a matrix in place, as `engine.gguf.arena.fill_matrix`, whose bytes these are.

    Raises:
        ModelFileError: It holds a value or scale that is not finite.
    """
    number = _FORMATS.get(ggml_type)
    if number is None or not matrix.layout.is_tiled:
        for _ in fill_matrix(data, matrix, ggml_type, raw, file_name):
            pass  # each piece is in its place by then
        return
    rows = np.ascontiguousarray(raw)
    start = data.ctypes.data
    places = (
        None if block is None else start + block * BLOCK_BYTES
        for block in (matrix.codes_block, matrix.scales_block, matrix.offsets_block)
    )
    bad = _encoder()(number, rows.ctypes.data, matrix.rows, matrix.cols, *places)
    if bad >= 0:
        raise ModelFileError(
            path=file_name,
            detail=f"tensor {matrix.name!r} has a block scale in row {bad} that is not finite in "
            "its type",
        )


@functools.cache
def _encoder() -> Callable[..., int]:
    function = ctypes.CDLL(str(native.LIBRARY)).kvarts_encode
    function.restype = ctypes.c_int64
    function.argtypes = [
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        *[ctypes.c_void_p] * 3,
    ]
    return function
