"""Rows of GGUF blocks to the planes of a layout, without loss.

For every grouped type, `scale * code + offset` in float32 is the value that the `gguf` package
computes for the same block, because each factor is the product that it forms itself (a zero may
change its sign where the code is stored shifted: Q4_0 and Q3_K). Pure functions over arrays; the
block formats are ggml's (ggml-common.h), the planes are those of `layouts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from engine.gguf.blocks import dequantise
from engine.gguf.layouts import Layout, super_blocks

Bytes = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

# IQ4_NL and IQ4_XS share a table; MXFP4's holds doubled e2m1 values, so that they are integers.
_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
).view(np.uint8)
_MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8).view(
    np.uint8
)

# 255 is NaN, and six times 2 ** 126 is no float32.
_LARGEST_EXPONENT = 252

# Shifts by a bare int would leave uint8 in the eyes of the type checker.
_FOUR = np.uint8(4)
_LOW = np.uint8(0x0F)
_HIGH = np.uint8(0xF0)


class Factors(NamedTuple):
    """Scales as products: float16 [rows, blocks] times int8 [rows, blocks, groups per block]."""

    of_block: npt.NDArray[np.float16]
    of_group: npt.NDArray[np.int8]

    def products(self) -> FloatArray:
        """The scales in float32, [rows, groups]."""
        wide = self.of_block.astype(np.float32)[..., None] * self.of_group.astype(np.float32)
        return wide.reshape(len(wide), -1)

    def pairs(self) -> Bytes:
        """Both factors of each row, one after another: the f16x8 scales of a layout."""
        rows = len(self.of_block)
        blocks, groups = np.ascontiguousarray(self.of_block), np.ascontiguousarray(self.of_group)
        parts = (blocks.view(np.uint8), groups.view(np.uint8).reshape(rows, -1))
        return np.concatenate(parts, axis=1)


class _Encoded(NamedTuple):
    """What a block format holds, whatever the layout: its own scales, and for tables the nibbles."""

    codes: Bytes
    scales: npt.NDArray[Any] | Factors
    offsets: npt.NDArray[Any] | Factors | None = None
    table: npt.NDArray[np.uint8] | None = None


class Planes(NamedTuple):
    """Some rows of a matrix in their layout.

    Attributes:
        codes: uint8 [rows, groups, bytes per group]; dense: uint8 [rows, 1, bytes per row].
        scales: [rows, groups] in the layout's scale type; of f16x8 and e8 uint8 [rows, bytes];
            None if dense.
        offsets: As `scales`; None if the layout has none.
    """

    codes: Bytes
    scales: npt.NDArray[Any] | None = None
    offsets: npt.NDArray[Any] | None = None


def encode_rows(ggml_type: Type, layout: Layout, raw: Bytes) -> Planes:
    """Converts rows of blocks to planes, in a few temporaries of the rows' size.

    Args:
        ggml_type: A type that has a layout.
        layout: Its layout, `layout_for(ggml_type)`.
        raw: uint8 [rows, bytes per row], contiguous.
    """
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    rows = raw.shape[0]
    encoder = _ENCODERS.get(ggml_type)
    # A damaged scale may be infinite: the caller looks at the planes, so no warnings here.
    with np.errstate(all="ignore"):
        if encoder is not None:
            codes, scales, offsets, table = encoder(raw.reshape(rows, -1, block_bytes))
            if table is not None and not layout.is_packed:
                codes = table[_nibbles(codes)]
            return Planes(
                codes.reshape(rows, -1, codes.shape[-1]),
                _numbers(layout, scales),
                None if offsets is None else _numbers(layout, offsets),
            )
        if block_elements == 1:
            return Planes(raw[:, None, :])
        cols = raw.shape[1] // block_bytes * block_elements
        values = dequantise(ggml_type, raw.reshape(-1), (rows, cols))
        dense = values.astype(np.float16) if layout.dtype == "f16" else values
        return Planes(dense.view(np.uint8)[:, None, :])


def _numbers(layout: Layout, scales: npt.NDArray[Any] | Factors) -> npt.NDArray[Any]:
    """Scales or offsets as the layout stores them."""
    if isinstance(scales, Factors):
        return scales.pairs() if layout.scale_dtype == "f16x8" else scales.products()
    scales = scales.reshape(len(scales), -1)
    if scales.dtype == np.uint8 and layout.scale_dtype == "f32":
        return _halved_power(scales)
    return scales


def _halved_power(exponents: Bytes) -> FloatArray:
    """Half of 2 ** (e - 127), for doubled codes; the two smallest are float32 denormals."""
    wide = exponents.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(0x00200000) << wide, (wide - 1) << 23)
    return bits.view(np.float32)


def all_finite(layout: Layout, planes: Planes) -> bool:
    """Whether no value (dense) and no scale or offset (q8, q4) is infinite or NaN."""
    if layout.dtype is not None:
        return _is_finite(planes.codes, layout.dtype)
    numbers = [plane for plane in (planes.scales, planes.offsets) if plane is not None]
    if layout.scale_dtype == "e8":
        return all(int(plane.max()) <= _LARGEST_EXPONENT for plane in numbers)
    dtype = layout.scale_dtype or "f32"
    if layout.scale_dtype == "f16x8":
        end = 2 * super_blocks(planes.codes.shape[1] * (layout.group or 1))
        numbers = [np.ascontiguousarray(plane[:, :end]).view(np.float16) for plane in numbers]
        dtype = "f16"
    return all(_is_finite(plane, dtype) for plane in numbers)


def _is_finite(numbers: npt.NDArray[Any], dtype: str) -> bool:
    if dtype == "f32":
        return bool(np.isfinite(numbers.view(np.float32)).all())
    # numpy widens 16-bit floats one by one, eight times slower than comparing their bits.
    infinity = 0x7C00 if dtype == "f16" else 0x7F80
    return int((numbers.view(np.uint16) & np.uint16(0x7FFF)).max()) < infinity


def _half(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `start` of each block: [rows, blocks]."""
    return blocks[..., start : start + 2].view(np.float16)[..., 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2 n] codes: the low halves, then the high ones."""
    return np.concatenate([packed & _LOW, packed >> _FOUR], axis=-1)


def _pack(codes: Bytes) -> Bytes:
    """[..., n] codes below 16 to [..., n / 2] bytes, the inverse of `_nibbles`."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | (codes[..., half:] << _FOUR)


def _fields(packed: Bytes, bits: int) -> Bytes:
    """[..., n] bytes to [..., 8 / bits, n] codes of `bits` bits, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _q4_0(blocks: Bytes) -> _Encoded:
    scale = _half(blocks, 0)
    return _Encoded(blocks[..., 2:18], scale, np.float16(-8) * scale)


def _q4_1(blocks: Bytes) -> _Encoded:
    return _Encoded(blocks[..., 4:20], _half(blocks, 0), _half(blocks, 2))


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """32 codes from 4 bytes of fifth bits and 16 bytes of nibbles."""
    return _nibbles(low) | (np.unpackbits(high, axis=-1, bitorder="little") << _FOUR)


def _q5_0(blocks: Bytes) -> _Encoded:
    codes = _five_bits(blocks[..., 2:6], blocks[..., 6:22]) - np.uint8(16)
    return _Encoded(codes, _half(blocks, 0))


def _q5_1(blocks: Bytes) -> _Encoded:
    codes = _five_bits(blocks[..., 4:8], blocks[..., 8:24])
    return _Encoded(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> _Encoded:
    return _Encoded(blocks[..., 2:34], _half(blocks, 0))


def _q2_k(blocks: Bytes) -> _Encoded:
    factors = blocks[..., :16]
    codes = _fields(blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 32), 2)
    scales = Factors(_half(blocks, 80), (factors & _LOW).view(np.int8))
    offsets = Factors(-_half(blocks, 82), (factors >> _FOUR).view(np.int8))
    return _Encoded(_pack(codes.reshape(*blocks.shape[:2], 16, 16)), scales, offsets)


def _q3_k(blocks: Bytes) -> _Encoded:
    shape = blocks.shape[:2]
    high = _fields(blocks[..., None, :32], 1).reshape(*shape, 16, 16)
    low = _fields(blocks[..., 32:96].reshape(*shape, 2, 32), 2).reshape(*shape, 16, 16)
    high_bits = _fields(blocks[..., 104:108], 2).reshape(*shape, 16)
    factors = _nibbles(blocks[..., 96:104]) | (high_bits << _FOUR)
    signed = factors.view(np.int8) - np.int8(32)
    scales = Factors(_half(blocks, 108), signed)
    # The stored code is 4 more than the value's: ggml subtracts 4 where the high bit is clear.
    return _Encoded(
        _pack(low | (high << np.uint8(2))),
        scales,
        Factors(np.float16(-4) * _half(blocks, 108), signed),
    )


def _scale_and_min(blocks: Bytes, start: int) -> tuple[Factors, Factors]:
    """The 8 six-bit scales and minima of a Q4_K or Q5_K block, negated, times its own."""
    first, second, third = (blocks[..., start + i : start + i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    return (
        Factors(_half(blocks, 0), scales.view(np.int8)),
        Factors(-_half(blocks, 2), minima.view(np.int8)),
    )


def _q4_k(blocks: Bytes) -> _Encoded:
    scales, minima = _scale_and_min(blocks, 4)
    # ggml pairs element i of one group with i of the next; here both halves are of one group.
    quads = blocks[..., 16:144].reshape(*blocks.shape[:2], 4, 2, 16)
    first, second = quads[..., 0, :], quads[..., 1, :]
    codes = np.stack(
        [(first & _LOW) | (second << _FOUR), (first >> _FOUR) | (second & _HIGH)], axis=-2
    )
    return _Encoded(codes.reshape(*blocks.shape[:2], 8, 16), scales, minima)


def _q5_k(blocks: Bytes) -> _Encoded:
    scales, minima = _scale_and_min(blocks, 4)
    shape = (*blocks.shape[:2], 8, 32)
    high = _fields(blocks[..., 16:48], 1)
    low = _fields(blocks[..., 48:176].reshape(*blocks.shape[:2], 4, 32), 4).reshape(shape)
    return _Encoded(low | (high << _FOUR), scales, minima)


def _q6_k(blocks: Bytes) -> _Encoded:
    shape = (*blocks.shape[:2], 16, 16)
    low = _fields(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), 4).reshape(shape)
    high = _fields(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), 2).reshape(shape)
    return _Encoded(
        (low | (high << _FOUR)) - np.uint8(32),
        Factors(_half(blocks, 208), blocks[..., 192:208].view(np.int8)),
    )


def _iq4_nl(blocks: Bytes) -> _Encoded:
    return _Encoded(blocks[..., 2:18], _half(blocks, 0), table=_IQ4_VALUES)


def _iq4_xs(blocks: Bytes) -> _Encoded:
    shape = blocks.shape[:2]
    high = _fields(blocks[..., 2:4], 2).swapaxes(-1, -2).reshape(*shape, 8)
    low = np.stack([blocks[..., 4:8] & _LOW, blocks[..., 4:8] >> _FOUR], axis=-1).reshape(*shape, 8)
    factors = (low | (high << _FOUR)).view(np.int8) - np.int8(32)
    codes = blocks[..., 8:136].reshape(*shape, 8, 16)
    return _Encoded(codes, Factors(_half(blocks, 0), factors), table=_IQ4_VALUES)


def _mxfp4(blocks: Bytes) -> _Encoded:
    return _Encoded(blocks[..., 1:17], blocks[..., 0], table=_MXFP4_VALUES)


_ENCODERS: dict[Type, Callable[[Bytes], _Encoded]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.IQ4_NL: _iq4_nl,
    Type.IQ4_XS: _iq4_xs,
    Type.MXFP4: _mxfp4,
}
