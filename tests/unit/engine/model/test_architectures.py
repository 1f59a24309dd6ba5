from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type

from engine.errors import EngineError, ModelFileError, UnsupportedModel
from engine.gguf.reader import GgufFile
from engine.model.architectures import read_spec
from engine.model.metadata import ArchitectureKeys
from engine.model.spec import (
    Activation,
    AttentionSpec,
    DenseFfnSpec,
    ModelSpec,
    RopePairing,
)
from tests.ggufs import TinyLlama, write_gguf, write_llama

KEYS: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.block_count": 3,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
REQUIRED = [
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
]

Tensors = dict[str, tuple[npt.NDArray[Any], Type]]


def vector(length: int = 64) -> tuple[npt.NDArray[Any], Type]:
    return np.zeros(length, np.float32), Type.F32


def embedding(*shape: int) -> tuple[npt.NDArray[Any], Type]:
    return np.zeros(shape, np.float32), Type.F32


def spec_of(
    folder: Path, changes: dict[str, Any] | None = None, tensors: Tensors | None = None
) -> ModelSpec:
    """The spec of a file with KEYS, changed: None removes a key."""
    keys = {name: value for name, value in (KEYS | (changes or {})).items() if value is not None}
    held = {"token_embd.weight": embedding(10, 64)} | (tensors or {})
    with GgufFile.open(write_gguf(folder / "m.gguf", keys, held)) as file:
        return read_spec(file)


def test_defaults_are_llama_cpps(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert (spec.architecture, spec.vocab_size, spec.width) == ("llama", 10, 64)
    assert (spec.num_layers, spec.context_train) == (3, 128)
    assert spec.norm_eps == pytest.approx(1e-5)
    assert spec.tied_head
    mixer, ffn = spec.layers[0].block.mixer, spec.layers[0].block.ffn
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(ffn, DenseFfnSpec)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8, 8, 8)
    assert mixer.scale == 8**-0.5
    assert mixer.biases == ffn.biases == frozenset()
    assert (ffn.hidden, ffn.activation) == (96, Activation.SILU)
    (rope,) = spec.ropes
    assert (rope.pairing, rope.dims, rope.base) == (RopePairing.NORM, 8, 10000.0)
    assert (rope.position_scale, rope.magnitude, rope.factors) == (1.0, 1.0, "")


def test_what_the_file_says_counts(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        {
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 16,
            "llama.attention.value_length": 16,
            "llama.rope.dimension_count": 16,
            "llama.rope.freq_base": 500000.0,
        },
        {
            "output.weight": embedding(10, 64),
            "rope_freqs.weight": vector(8),
            "blk.0.attn_q.bias": vector(),
            "blk.0.ffn_down.bias": vector(),
        },
    )
    mixer, ffn = spec.layers[2].block.mixer, spec.layers[2].block.ffn
    assert isinstance(mixer, AttentionSpec)
    assert isinstance(ffn, DenseFfnSpec)
    assert (mixer.num_kv_heads, mixer.head_dim, mixer.scale) == (2, 16, 0.25)
    assert mixer.biases == {"attn_q"}
    assert ffn.biases == {"ffn_down"}
    assert (spec.ropes[0].dims, spec.ropes[0].base) == (16, 500000.0)
    assert spec.ropes[0].factors == "rope_freqs.weight"
    assert not spec.tied_head


@pytest.mark.parametrize(
    ("keys", "scale"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 0.25),
        ({"scaling.factor": 4.0}, 0.25),  # the type is linear where the file has none
        ({"scale_linear": 2.0}, 0.5),  # the name of old files
        ({"scale_linear": 2.0, "scaling.factor": 8.0}, 0.125),
        ({"scaling.type": "none", "scaling.factor": 4.0}, 1.0),
        ({"scaling.type": "linear"}, 1.0),
        ({"scaling.factor": 0.0}, 1.0),
    ],
    ids=str,
)
def test_positions_are_scaled_as_llama_cpp_scales_them(
    tmp_path: Path, keys: dict[str, Any], scale: float
) -> None:
    spec = spec_of(tmp_path, {f"llama.rope.{name}": value for name, value in keys.items()})
    assert spec.ropes[0].position_scale == scale


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_key_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=rf"m\.gguf: key 'llama\.{name}' is missing"):
        spec_of(tmp_path, {f"llama.{name}": None})


# What is damaged, and what is well formed and not implemented.
REFUSED: list[tuple[str, Any, type[EngineError], str]] = [
    ("block_count", 0, ModelFileError, "is 0, expected at least 1"),
    ("block_count", 513, ModelFileError, "is 513, allowed are 0 to 512"),
    ("block_count", 2**32 - 1, ModelFileError, "allowed are 0 to 512"),
    ("embedding_length", "wide", ModelFileError, "is of type string, expected an integer"),
    ("attention.head_count", 0, ModelFileError, "is 0, expected at least 1"),
    ("attention.head_count", 65, ModelFileError, "is 0, expected at least 1"),
    ("attention.head_count_kv", 3, UnsupportedModel, "is 3, only a divisor of 8"),
    ("attention.value_length", 4, UnsupportedModel, "is 4.0, only 8 is implemented"),
    ("attention.clamp_kqv", 8.0, UnsupportedModel, "is 8.0, only 0.0 is implemented"),
    ("rope.dimension_count", 7, UnsupportedModel, "is 7, only an even number up to 8"),
    ("rope.dimension_count", 10, UnsupportedModel, "is 10, only an even number up to 8"),
    # llama.cpp's llama turns whole heads.
    ("rope.dimension_count", 6, UnsupportedModel, "is 6, only the head's 8 is implemented"),
    ("rope.freq_base", 0.0, ModelFileError, "is 0.0, expected more than 0"),
    ("rope.freq_base", -1.0, ModelFileError, "is -1.0, expected more than 0"),
    ("rope.freq_base", float("nan"), ModelFileError, "is nan, expected a finite number"),
    ("rope.scaling.type", "dynamic", UnsupportedModel, "only none, linear, longrope or yarn"),
    ("rope.scaling.factor", -2.0, UnsupportedModel, "is -2.0, only 0 or more"),
    ("expert_count", 1025, ModelFileError, "llama.expert_count"),
    ("expert_used_count", 2, UnsupportedModel, "is 2.0, only 0 is implemented"),
    # Known to llama.cpp and read by nobody here.
    ("logit_scale", 0.5, UnsupportedModel, "changes the maths and is not implemented for llama"),
    ("rope.scaling.yarn_log_multiplier", 0.1, UnsupportedModel, "changes the maths"),
    ("attention.causal", 1, UnsupportedModel, "changes the maths"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"), REFUSED, ids=[f"{r[0]}={r[1]}" for r in REFUSED]
)
def test_what_would_be_run_otherwise_than_meant_is_refused_by_name(
    tmp_path: Path, name: str, value: Any, error: type[EngineError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as refusal:
        spec_of(tmp_path, {f"llama.{name}": value})
    # Heads wider than the model show in the width of one head.
    named = "attention.key_length" if (name, value) == ("attention.head_count", 65) else name
    assert f"llama.{named}" in str(refusal.value)


@pytest.mark.parametrize(
    "key",
    [
        "llama.vocab_size",
        "llama.tensor_data_layout",
        "llama.attention.sliding_window",  # llama.cpp's llama does not slide
        "llama.rope.scaling.finetuned",
        "llama.some_tool.note",  # not a key of llama.cpp
        "qwen2.logit_scale",  # another architecture's
        "general.quantization_version",
    ],
)
def test_keys_without_a_meaning_for_the_maths_are_ignored(tmp_path: Path, key: str) -> None:
    assert spec_of(tmp_path, {key: 7}) == spec_of(tmp_path)


def test_keys_that_say_what_is_done_anyway_are_accepted(tmp_path: Path) -> None:
    changes = {"expert_count": 0, "attention.clamp_kqv": 0.0, "rope.scaling.alpha": 0.0}
    changed = {f"llama.{name}": value for name, value in changes.items()}
    assert spec_of(tmp_path, changed) == spec_of(tmp_path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "gpt9"})
    refusal = pytest.raises(
        UnsupportedModel, match=r"'gpt9' is not supported \(supported: .*\bllama\b"
    )
    with GgufFile.open(path) as file, refusal:
        read_spec(file)


@pytest.mark.parametrize("shape", [None, (640,), (2, 5, 64)], ids=str)
def test_a_model_needs_an_embedding(tmp_path: Path, shape: tuple[int, ...] | None) -> None:
    tensors = {} if shape is None else {"token_embd.weight": embedding(*shape)}
    path = write_gguf(tmp_path / "m.gguf", KEYS, tensors)
    refusal = pytest.raises(UnsupportedModel, match=r"tensor token_embd\.weight is missing")
    with GgufFile.open(path) as file, refusal:
        read_spec(file)


def test_every_variant_of_the_tiny_llama_is_read(tmp_path: Path) -> None:
    model = TinyLlama(num_layers=5, num_kv_heads=1, rope_scale=8.0, tied_head=True)
    with GgufFile.open(write_llama(tmp_path / "m.gguf", model)) as file:
        spec = read_spec(file)
    assert (spec.num_layers, spec.tied_head, spec.ropes[0].position_scale) == (5, True, 0.125)


def test_a_biased_matrix_is_one_whose_first_layer_has_a_bias(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_v.bias": vector(), "blk.1.attn_k.bias": vector()}
    with GgufFile.open(write_gguf(tmp_path / "m.gguf", KEYS, tensors)) as file:
        assert ArchitectureKeys(file, "llama").biases("attn_k", "attn_v") == {"attn_v"}
