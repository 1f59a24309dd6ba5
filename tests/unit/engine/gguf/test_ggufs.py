"""The fixture module itself: other tests rest on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.gguf.layouts import layout_for
from tests.ggufs import TinyLlama, bpe_tokenizer, random_blocks, spm_tokenizer, write_llama

TYPES = [t for t in Type if layout_for(t) is not None]


@pytest.mark.parametrize("ggml_type", [Type.F32, Type.Q4_0, Type.Q4_K], ids=lambda t: t.name)
def test_the_same_arguments_give_the_same_bytes(tmp_path: Path, ggml_type: Type) -> None:
    model = TinyLlama(width=256, hidden=256, ggml_type=ggml_type)
    first = write_llama(tmp_path / "a.gguf", model).read_bytes()
    assert write_llama(tmp_path / "b.gguf", model).read_bytes() == first
    other = TinyLlama(width=256, hidden=256, ggml_type=ggml_type, seed=1)
    assert write_llama(tmp_path / "c.gguf", other).read_bytes() != first


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_random_blocks_have_the_spread_that_was_asked_for(ggml_type: Type) -> None:
    raw = random_blocks(np.random.default_rng(0), ggml_type, (64, 256), std=0.05)
    values = quants.dequantize(raw, ggml_type)
    assert values.shape == (64, 256)
    assert np.isfinite(values).all()
    # MXFP4, NVFP4 and IQ1_M have no float16 factor of their own to scale by.
    if ggml_type not in (Type.MXFP4, Type.NVFP4, Type.IQ1_M):
        assert 0.04 < values.std() < 0.06


def test_vocabularies_are_consistent() -> None:
    for tokenizer in (spm_tokenizer(), bpe_tokenizer()):
        assert len(set(tokenizer.tokens)) == len(tokenizer.tokens) == len(tokenizer.types)
        for merge in tokenizer.merges:
            left, right = merge.split(" ")
            assert {left, right, left + right} <= set(tokenizer.tokens)
    assert len(spm_tokenizer().scores) == len(spm_tokenizer().tokens)
