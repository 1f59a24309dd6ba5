from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gguf.encode import Planes, all_finite, encode_rows
from engine.gguf.layouts import Layout, layout_for
from tests.ggufs import random_blocks
from tests.unit.engine.gguf.planes import decode_rows

TYPES = [t for t in Type if layout_for(t) is not None]
# Shifted codes give +0 where the reference multiplies a negative scale by zero and has -0.
SHIFTED = {Type.Q4_0, Type.Q3_K}


def _layout(ggml_type: Type) -> Layout:
    layout = layout_for(ggml_type)
    assert layout is not None
    return layout


def _decode(layout: Layout, planes: Planes) -> npt.NDArray[np.float32]:
    rows = len(planes.codes)
    return decode_rows(layout, planes.codes.reshape(rows, -1), planes.scales, planes.offsets)


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    cols=st.sampled_from([256, 512, 768]),
    std=st.sampled_from([1e-4, 0.02, 1.0, 30.0]),
)
def test_decoding_gives_the_reference_bit_for_bit(
    ggml_type: Type, seed: int, rows: int, cols: int, std: float
) -> None:
    rng = np.random.default_rng(seed)
    raw = random_blocks(rng, ggml_type, (rows, cols), std)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, ggml_type)
    layout = _layout(ggml_type)
    values = _decode(layout, encode_rows(ggml_type, layout, raw))
    if ggml_type in SHIFTED or ggml_type in (Type.F16, Type.BF16, Type.F32):
        np.testing.assert_array_equal(values, expected)
    else:
        np.testing.assert_array_equal(_bits(values), _bits(expected))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("std", [1e-4, 1.0])
def test_the_native_layout_holds_the_same_values(ggml_type: Type, std: float) -> None:
    raw = random_blocks(np.random.default_rng(11), ggml_type, (5, 768), std)
    layout = layout_for(ggml_type, tiled=True)
    assert layout is not None
    values = _decode(layout, encode_rows(ggml_type, layout, raw))
    np.testing.assert_array_equal(values, quants.dequantize(raw, ggml_type))


def test_every_exponent_of_mxfp4_that_float32_holds_is_exact_and_others_are_not_finite() -> None:
    raw = random_blocks(np.random.default_rng(3), Type.MXFP4, (256, 32))
    raw[:, 0] = np.arange(256)
    layout = layout_for(Type.MXFP4, tiled=True)
    assert layout is not None
    whole = raw[:253]
    values = _decode(layout, encode_rows(Type.MXFP4, layout, whole))
    np.testing.assert_array_equal(values, quants.dequantize(whole, Type.MXFP4))
    for exponent in range(256):
        row = encode_rows(Type.MXFP4, layout, raw[exponent : exponent + 1])
        assert all_finite(layout, row) == (exponent <= 252)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_planes_have_the_shapes_that_the_layout_says(ggml_type: Type) -> None:
    layout, rows, cols = _layout(ggml_type), 3, 512
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    raw = np.zeros((rows, cols // block_elements * block_bytes), np.uint8)
    planes = encode_rows(ggml_type, layout, raw)
    assert planes.codes.dtype == np.uint8
    assert planes.codes.size == rows * layout.code_row_bytes(cols)
    for plane, is_there in ((planes.scales, layout.group), (planes.offsets, layout.has_offset)):
        assert (plane is not None) == bool(is_there)
        if plane is not None:
            assert plane.dtype == np.dtype(str(layout.scale_dtype).replace("f", "float"))
            assert plane.shape == (rows, cols // (layout.group or 1))
            assert plane.nbytes == rows * layout.scale_row_bytes(cols)


@pytest.mark.parametrize("ggml_type", [Type.TQ1_0, Type.TQ2_0, Type.NVFP4], ids=lambda t: t.name)
def test_dense_float16_holds_every_scale_of_these_types(ggml_type: Type) -> None:
    # All scale bytes beside all codes: 256 blocks, whose scale is each byte pattern in turn.
    raw = random_blocks(np.random.default_rng(5), ggml_type, (256, 256))
    if ggml_type is Type.NVFP4:
        raw.reshape(256, -1, 36)[:, :, 0] = np.arange(256, dtype=np.uint8)[:, None]
    expected = quants.dequantize(raw, ggml_type)
    layout = _layout(ggml_type)
    np.testing.assert_array_equal(_decode(layout, encode_rows(ggml_type, layout, raw)), expected)


def test_every_mxfp4_exponent_decodes() -> None:
    raw = random_blocks(np.random.default_rng(2), Type.MXFP4, (256, 32))
    raw[:, 0] = np.arange(256)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, Type.MXFP4)
        layout = _layout(Type.MXFP4)
        values = _decode(layout, encode_rows(Type.MXFP4, layout, raw))
    np.testing.assert_array_equal(_bits(values), _bits(expected))


def test_q4_0_keeps_scales_up_to_8188_and_gives_an_infinite_offset_above() -> None:
    raw = np.zeros((2, 18), np.uint8)
    raw[:, :2] = np.array([[8188], [8192]], np.float16).view(np.uint8)
    planes = encode_rows(Type.Q4_0, _layout(Type.Q4_0), raw)
    assert planes.offsets is not None
    assert planes.offsets.tolist() == [[-65504.0], [-np.inf]]
