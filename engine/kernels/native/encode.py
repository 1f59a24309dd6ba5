"""Rows of GGUF blocks to tiled planes by the native library, several times as fast as numpy.

Only the formats in which experts usually come: whoever waits for one waits for this.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelFileError
from engine.gguf.arena import Bytes, Matrix, fill_matrix
from engine.gguf.expert_records import ExpertRecords
from engine.gguf.layouts import BLOCK_BYTES
from engine.kernels import native

# Of encode.cc.
_ENDED, _ERRNO, _NO_MEMORY = 1, 2, 4
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
    bad = _function("kvarts_encode", 7)(number, rows.ctypes.data, matrix.rows, matrix.cols, *places)
    if bad >= 0:
        raise ModelFileError(
            path=file_name,
            detail=_not_finite(matrix.name, bad),
        )


class RecordReader:
    """Reads whole records in one call, without the interpreter, where their formats allow it."""

    def __init__(self, records: ExpertRecords, num_layers: int) -> None:
        self._records = records
        self._parts = [_parts_of(records, layer) for layer in range(num_layers)]
        self._read = _function("kvarts_read_record", 5)

    @property
    def shares(self) -> bool:
        """Whether a step's threads read every record together that the step waits for."""
        return all(parts is not None for parts in self._parts)

    def read(self, layer: int, expert: int, part: int, target: Bytes) -> None:
        """Reads one expert into a slot, as `ExpertRecords.read`; there is one part.

        Raises:
            ModelFileError: The file is shorter than it was, or a value of it is not finite.
            OSError: It cannot be read.
        """
        del part
        parts = self._parts[layer]
        if parts is None:
            self._records.read(layer, expert, target)
            return
        detail = ctypes.c_int64(0)
        wrong = self._read(
            parts.ctypes.data, len(parts), expert, target.ctypes.data, ctypes.addressof(detail)
        )
        if wrong:
            self._refuse(layer, *divmod(wrong, 8), detail.value)

    def _refuse(self, layer: int, part: int, what: int, detail: int) -> NoReturn:
        name = self._records.sources(layer)[part][0].name
        if what == _ERRNO:
            raise OSError(detail, os.strerror(detail))
        if what == _NO_MEMORY:
            raise MemoryError("no memory to read an expert")
        if what == _ENDED:
            raise ModelFileError(self._records.name, f"ends inside tensor {name!r}")
        raise ModelFileError(self._records.name, _not_finite(name, detail))


def _parts_of(records: ExpertRecords, layer: int) -> npt.NDArray[np.int64] | None:
    """The layer's `Part`s of encode.cc; None if one is of another format."""
    rows: list[list[int]] = []
    for (info, descriptor), matrix in zip(
        records.sources(layer), records.matrices(layer), strict=True
    ):
        number = _FORMATS.get(info.ggml_type)
        if number is None or not matrix.layout.is_tiled:
            return None
        blocks = (matrix.codes_block, matrix.scales_block, matrix.offsets_block)
        places = [-1 if block is None else block * BLOCK_BYTES for block in blocks]
        nbytes = info.nbytes // info.shape[0]
        rows.append([descriptor, number, info.offset, nbytes, matrix.rows, matrix.cols, *places])
    return np.array(rows, np.int64)


def _not_finite(name: str, row: int) -> str:
    return f"tensor {name!r} has a block scale in row {row} that is not finite in its type"


@functools.cache
def _function(name: str, num_pointers: int) -> Callable[..., int]:
    """A function of the library whose arguments are all as wide as a pointer."""
    function = getattr(ctypes.CDLL(str(native.LIBRARY)), name)
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_void_p] * num_pointers
    return function
