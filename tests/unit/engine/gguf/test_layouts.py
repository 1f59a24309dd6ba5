from __future__ import annotations

from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from engine.gguf.layouts import BLOCK_BYTES, Layout, layout_for, padded_rows

Q4 = Layout("q4", group=32, scale_dtype="f16", has_offset=True)
Q8 = Layout("q8", group=16, scale_dtype="f32")
LAYOUTS = [layout for t in Type if (layout := layout_for(t)) is not None]


@pytest.mark.parametrize(
    ("layout", "rows", "cols", "blocks"),
    [
        # 32 x 64 nibbles = 1024 bytes; 32 x 2 groups x 2 bytes = 128; the same of offsets.
        (Q4, 32, 64, (16, 2, 2)),
        # One row is stored as 32.
        (Q4, 1, 64, (16, 2, 2)),
        # 64 x 48 bytes = 3072; 64 x 3 groups x 4 bytes = 768; no offsets.
        (Q8, 33, 48, (48, 12, 0)),
        (Layout("dense", dtype="bf16"), 31, 3, (3, 0, 0)),
        (Layout("dense", dtype="f32"), 32, 1, (2, 0, 0)),
    ],
)
def test_planes_have_the_sizes_of_their_definition(
    layout: Layout, rows: int, cols: int, blocks: tuple[int, int, int]
) -> None:
    assert layout.plane_blocks(rows, cols) == blocks
    assert layout.nbytes(rows, cols) == BLOCK_BYTES * sum(blocks)


@given(st.integers(1, 10_000))
def test_rows_are_padded_to_the_next_32(rows: int) -> None:
    padded = padded_rows(rows)
    assert padded % 32 == 0
    assert 0 <= padded - rows < 32


@given(st.sampled_from(LAYOUTS), st.integers(1, 500), st.integers(1, 20))
def test_a_plane_is_never_shorter_than_its_rows(layout: Layout, rows: int, groups: int) -> None:
    cols = groups * (layout.group or 1)
    codes, scales, offsets = layout.plane_blocks(rows, cols)
    assert codes * BLOCK_BYTES >= rows * layout.code_row_bytes(cols)
    assert scales * BLOCK_BYTES >= rows * layout.scale_row_bytes(cols)
    assert offsets == (scales if layout.has_offset else 0)


@pytest.mark.parametrize("layout", [Q4, Q8])
def test_columns_must_be_whole_groups(layout: Layout) -> None:
    with pytest.raises(ValueError, match="40 columns are not a multiple of the group"):
        layout.plane_blocks(32, 40)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "dense"},
        {"kind": "dense", "dtype": "f32", "group": 32, "scale_dtype": "f16"},
        {"kind": "dense", "dtype": "f32", "has_offset": True},
        {"kind": "q4", "dtype": "f16"},
        {"kind": "q4", "group": 32},
        {"kind": "q8", "scale_dtype": "f32"},
        # Forms that only the native kernels read.
        {"kind": "iq4", "group": 32, "scale_dtype": "f16"},
        {"kind": "q4", "group": 32, "scale_dtype": "f16x8", "has_offset": True},
    ],
)
def test_fields_of_another_kind_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="fit a"):
        Layout(**fields)


def test_layouts_are_keys() -> None:
    assert len({Q4, Layout("q4", group=32, scale_dtype="f16", has_offset=True), Q8}) == 2


# Bits per weight of the file's own blocks, and what the arena may add to them.
@pytest.mark.parametrize(
    ("ggml_type", "most"),
    [
        (Type.Q4_0, 5.0),  # 4.5, and an offset
        (Type.Q4_1, 5.0),
        (Type.Q4_K, 4.7),  # 4.5
        (Type.Q8_0, 8.5),
        (Type.Q6_K, 8.6),  # 6.6, in bytes
        (Type.IQ4_NL, 4.5),
        (Type.IQ4_XS, 4.4),  # 4.25
        (Type.MXFP4, 4.25),
    ],
    ids=lambda t: getattr(t, "name", None),
)
def test_tiled_layouts_are_compact(ggml_type: Type, most: float) -> None:
    layout = layout_for(ggml_type, tiled=True)
    assert layout is not None
    assert layout.nbytes(4096, 4096) * 8 / 4096**2 <= most


@pytest.mark.parametrize("ggml_type", [Type.I32, Type.F64, Type.Q8_1, Type.Q8_K, Type.Q1_0])
def test_types_without_a_layout_have_none(ggml_type: Type) -> None:
    assert layout_for(ggml_type) is None
