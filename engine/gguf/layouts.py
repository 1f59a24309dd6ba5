"""How a weight matrix lies in the arena: a few layouts, in pure integers.

A matrix [rows, cols] is stored as planes. Quantised codes come in groups of `group` columns that
share a scale and, in some layouts, an offset:

    value[r, c] = scale[r, c // group] * code[r, c] + offset[r, c // group]      (in float32)

| plane   | dense                      | q8                       | q4                             |
|---------|----------------------------|--------------------------|--------------------------------|
| codes   | [rows_padded, cols] values | [rows_padded, cols] int8 | [rows_padded, cols / 2], below |
| scales  | -                          | [rows_padded, cols / group] in `scale_dtype`, both        |
| offsets | -                          | the same shape and type, where `has_offset`               |

Matrices for the native kernels are tiled (`Layout.is_tiled`) and may be more compact: kinds iq4 and
mx4 are q4 whose codes index a table of values, and scales may be

| scale_dtype | bytes of a row                                                                    |
|-------------|-----------------------------------------------------------------------------------|
| f16x8       | a float16 per 256 columns, then an int8 per group; the scale is their product     |
| e8          | e per group; the scale is 2 ** (e - 128), because the codes are doubled           |

A q4 group of G unsigned codes is G / 2 bytes, byte j = code[j] | code[j + G / 2] << 4. Every plane
starts on a 64-byte block, rows are padded with zeros to a multiple of 32.

This module holds no arrays: the planner and the kernels need the numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gguf import GGMLQuantizationType as Type

BLOCK_BYTES = 64
ROW_MULTIPLE = 32
TILE_ROWS = 16

DenseDtype = Literal["f32", "f16", "bf16"]
SUPER_BLOCK = 256

ScaleDtype = Literal["f32", "f16", "f16x8", "e8"]
_DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f16x8": 1, "e8": 1}


@dataclass(frozen=True)
class Layout:
    """One way to store a matrix. `dtype` belongs to dense, the rest to the others.

    `is_tiled`: planes are interleaved for the native kernels, which take `TILE_ROWS` rows at a
    time. The order is, per tile of 16 rows and per group, runs of 64 bytes of 16 rows x 4 columns
    (of 4-bit kinds those and the ones half a group on), then in the scales and offsets plane 16
    numbers; of f16x8 per tile first all float16, then all int8. Signed codes are stored plus 128.
    Dense matrices are never tiled. `code_bound` is the largest magnitude of a code.
    """

    kind: Literal["dense", "q8", "q4", "iq4", "mx4"]
    dtype: DenseDtype | None = None
    group: Literal[16, 32] | None = None
    scale_dtype: ScaleDtype | None = None
    has_offset: bool = False
    is_tiled: bool = False
    code_bound: int = 128

    def __post_init__(self) -> None:
        if self.kind == "dense":
            fits = self.dtype is not None and self.group is None and self.scale_dtype is None
            fits = fits and not self.has_offset
        else:
            fits = self.dtype is None and self.group is not None and self.scale_dtype is not None
            is_plain = self.kind in ("q8", "q4") and self.scale_dtype in ("f32", "f16")
            fits = fits and (is_plain or self.is_tiled)
        if not fits:
            raise ValueError(f"these fields do not fit a {self.kind} layout: {self}")

    def code_row_bytes(self, cols: int) -> int:
        """Bytes of one row of the codes plane (of the values, if dense)."""
        if self.dtype is not None:
            return cols * _DTYPE_BYTES[self.dtype]
        self._check_cols(cols)
        return cols // 2 if self.is_packed else cols

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.kind in ("q4", "iq4", "mx4")

    def scale_row_bytes(self, cols: int) -> int:
        """Bytes of one row of the scales plane, and of the offsets plane if there is one."""
        if self.group is None or self.scale_dtype is None:
            return 0
        self._check_cols(cols)
        groups = cols // self.group * _DTYPE_BYTES[self.scale_dtype]
        return groups + 2 * super_blocks(cols) if self.scale_dtype == "f16x8" else groups

    def plane_blocks(self, rows: int, cols: int) -> tuple[int, int, int]:
        """Lengths of the codes, scales and offsets planes in 64-byte blocks (0: no such plane).

        Raises:
            ValueError: `cols` is not a multiple of the group.
        """
        padded = padded_rows(rows)
        scales = _blocks(padded * self.scale_row_bytes(cols))
        codes = _blocks(padded * self.code_row_bytes(cols))
        return codes, scales, scales if self.has_offset else 0

    def nbytes(self, rows: int, cols: int) -> int:
        """Bytes of a matrix in the arena, padding included."""
        return BLOCK_BYTES * sum(self.plane_blocks(rows, cols))

    def _check_cols(self, cols: int) -> None:
        if self.group is not None and cols % self.group:
            raise ValueError(f"{cols} columns are not a multiple of the group of {self.group}")


def super_blocks(cols: int) -> int:
    """Float16 factors of a row of f16x8 scales."""
    return -(-cols // SUPER_BLOCK)


def padded_rows(rows: int) -> int:
    """Rows of a plane: rounded up so that kernels never need a short tile."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)


def _q4(group: Literal[16, 32], scale_dtype: ScaleDtype) -> Layout:
    return Layout("q4", group=group, scale_dtype=scale_dtype, has_offset=True)


def _q8(group: Literal[16, 32], scale_dtype: ScaleDtype, has_offset: bool = False) -> Layout:
    return Layout("q8", group=group, scale_dtype=scale_dtype, has_offset=has_offset)


_F32 = Layout("dense", dtype="f32")
_F16 = Layout("dense", dtype="f16")

# Each mapping is exact: see encode.py for the codes, test_encode.py for the proof.
_LAYOUTS: dict[Type, Layout] = {
    Type.F32: _F32,
    Type.F16: _F16,
    Type.BF16: Layout("dense", dtype="bf16"),
    Type.Q4_0: _q4(32, "f16"),
    Type.Q4_1: _q4(32, "f16"),
    Type.Q2_K: _q4(16, "f32"),
    Type.Q3_K: _q4(16, "f32"),
    Type.Q4_K: _q4(32, "f32"),
    Type.Q5_0: _q8(32, "f16"),
    Type.Q5_1: _q8(32, "f16", has_offset=True),
    Type.Q5_K: _q8(32, "f32", has_offset=True),
    Type.Q6_K: _q8(16, "f32"),
    Type.Q8_0: _q8(32, "f16"),
    Type.IQ4_NL: _q8(32, "f16"),
    Type.IQ4_XS: _q8(32, "f32"),
    Type.MXFP4: _q8(32, "f32"),
    # Values that fit float16: a float16 scale times -1, 0 or 1, or two 4-bit significands.
    Type.TQ1_0: _F16,
    Type.TQ2_0: _F16,
    Type.NVFP4: _F16,
    # Products of a float16 scale with further factors: only float32 holds them all.
    Type.IQ1_S: _F32,
    Type.IQ1_M: _F32,
    Type.IQ2_XXS: _F32,
    Type.IQ2_XS: _F32,
    Type.IQ2_S: _F32,
    Type.IQ3_XXS: _F32,
    Type.IQ3_S: _F32,
}


def _tiled(
    kind: Literal["q8", "q4", "iq4", "mx4"],
    group: Literal[16, 32],
    scale_dtype: ScaleDtype,
    code_bound: int,
    *,
    has_offset: bool = False,
) -> Layout:
    return Layout(
        kind,
        group=group,
        scale_dtype=scale_dtype,
        has_offset=has_offset,
        is_tiled=True,
        code_bound=code_bound,
    )


# Those of kernels.h, `kFormats`. Exact as the others, and hardly larger than the file.
_TILED: dict[Type, Layout] = {
    Type.Q4_0: _tiled("q4", 32, "f16", 15, has_offset=True),
    Type.Q4_1: _tiled("q4", 32, "f16", 15, has_offset=True),
    Type.Q2_K: _tiled("q4", 16, "f16x8", 15, has_offset=True),
    Type.Q3_K: _tiled("q4", 16, "f16x8", 15, has_offset=True),
    Type.Q4_K: _tiled("q4", 32, "f16x8", 15, has_offset=True),
    Type.Q5_0: _tiled("q8", 32, "f16", 16),
    Type.Q5_1: _tiled("q8", 32, "f16", 31, has_offset=True),
    Type.Q5_K: _tiled("q8", 32, "f16x8", 31, has_offset=True),
    Type.Q6_K: _tiled("q8", 16, "f16x8", 32),
    Type.Q8_0: _tiled("q8", 32, "f16", 128),
    Type.IQ4_NL: _tiled("iq4", 32, "f16", 127),
    Type.IQ4_XS: _tiled("iq4", 32, "f16x8", 127),
    Type.MXFP4: _tiled("mx4", 32, "e8", 12),
}


def layout_for(ggml_type: Type, *, tiled: bool = False) -> Layout | None:
    """Returns the layout that stores matrices of a GGUF type without loss; None if none does.

    None are integers, float64, and the block types that ggml keeps for activations.

    Args:
        ggml_type: The type.
        tiled: The layout for the native kernels, which hold dense matrices as XLA does.
    """
    layout = _LAYOUTS.get(ggml_type)
    return _TILED.get(ggml_type, layout) if tiled else layout
