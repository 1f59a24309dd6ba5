from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.errors import NotSupported
from engine.gguf import blocks
from engine.gguf.blocks import dequantise
from engine.gguf.layouts import layout_for
from tests.ggufs import random_blocks

TYPES = [t for t in Type if layout_for(t) is not None]


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_values_are_those_of_the_gguf_package(
    ggml_type: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "PIECE_ELEMENTS", 1000)
    raw = random_blocks(np.random.default_rng(1), ggml_type, (15, 256))
    expected = quants.dequantize(raw, ggml_type)
    values = dequantise(ggml_type, raw.reshape(-1), (3, 5, 256))
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected.reshape(3, 5, 256))


def test_a_damaged_block_gives_infinity_and_no_warning() -> None:
    raw = np.full(34, 0x7C, np.uint8)
    raw[0] = 0
    assert np.isinf(dequantise(Type.Q8_0, raw, (32,))).all()


@pytest.mark.parametrize("ggml_type", [Type.I32, Type.F64, Type.Q1_0], ids=lambda t: t.name)
def test_other_types_are_refused_by_name(ggml_type: Type) -> None:
    nbytes = {Type.I32: 512, Type.F64: 1024, Type.Q1_0: 18}[ggml_type]
    with pytest.raises(NotSupported, match=ggml_type.name):
        dequantise(ggml_type, np.zeros(nbytes, np.uint8), (128,))


def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"33 bytes are not a Q8_0 tensor of shape \(32,\)"):
        dequantise(Type.Q8_0, np.zeros(33, np.uint8), (32,))
