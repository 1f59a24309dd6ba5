"""What encoder files say, and how a file that says something else is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import tests.encoders as files
from engine.errors import ModelFileError, UnsupportedModel
from engine.gguf.reader import GgufFile
from engine.model.architectures import read_spec
from engine.model.encoder_spec import EncoderSpec, ScoredState, ScoringSpec
from engine.model.moving import can_move
from engine.model.spec import KvHeads, ModelSpec
from engine.model.tensors import check_tensors
from tests.encoders import TinyEncoder
from tests.families import FAMILIES, write_family
from tests.ggufs import encode, write_gguf


def spec_of(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        check_tensors(spec, file)
        return spec


def test_an_encoder_keeps_nothing(tmp_path: Path) -> None:
    spec = spec_of(files.write_encoder(tmp_path / "bert.gguf"))
    assert spec.encoder == EncoderSpec(num_token_types=2, has_positions=True)
    assert (spec.kv, spec.num_full_layers, spec.has_attention) == (KvHeads(0, 0, 0), 0, False)
    assert not can_move(spec)
    assert spec.scoring is None


def test_nomic_turns_instead_of_learning_positions(tmp_path: Path) -> None:
    path = files.write_encoder(
        tmp_path / "nomic.gguf", TinyEncoder("nomic-bert", has_token_types=False)
    )
    spec = spec_of(path)
    assert spec.encoder == EncoderSpec(num_token_types=0)
    assert spec.ropes[0].base == 1000.0


@pytest.mark.parametrize(
    ("model", "scoring"),
    [
        (
            TinyEncoder(has_dense_head=True, num_scores=1),
            ScoringSpec(ScoredState.FIRST, True, 1, frozenset({"cls", "cls.output"})),
        ),
        (
            TinyEncoder(num_scores=3, has_mean_head=True),
            ScoringSpec(ScoredState.MEAN, False, 3, frozenset({"cls.output"})),
        ),
    ],
)
def test_heads(tmp_path: Path, model: TinyEncoder, scoring: ScoringSpec) -> None:
    assert spec_of(files.write_encoder(tmp_path / "rank.gguf", model)).scoring == scoring


def test_a_qwen3_with_a_head_scores_by_shares(tmp_path: Path) -> None:
    path = write_family(tmp_path / "plain.gguf", FAMILIES["qwen3"])
    assert spec_of(path).scoring is None


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda keys: keys.pop(name)


def with_key(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda keys: keys.update({name: value})


def _encoded() -> dict[str, Any]:
    tensors = files.encoder_tensors(TinyEncoder())
    return {name: (encode(values, kind), kind) for name, (values, kind) in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_key("bert.attention.causal", True), "attention.causal is True"),
        (without("bert.attention.causal"), "attention.causal is True"),
        (without("tokenizer.ggml.token_type_count"), "token_type_count is missing or 0"),
        (without("bert.attention.layer_norm_epsilon"), "attention.layer_norm_epsilon"),
        (with_key("bert.attention.clamp_kqv", 3.0), "clamp_kqv is 3.0"),
    ],
)
def test_other_keys_are_refused_by_name(
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    keys = files.encoder_keys(TinyEncoder())
    change(keys)
    with pytest.raises((UnsupportedModel, ModelFileError), match=message):
        spec_of(write_gguf(tmp_path / "bad.gguf", keys, _encoded(), architecture="bert"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("position_embd.weight", None, "position_embd.weight is missing"),
        ("position_embd.weight", (100, files.WIDTH), r"position_embd.weight has shape \(100, 64\)"),
        ("token_types.weight", (3, files.WIDTH), r"token_types.weight has shape \(3, 64\)"),
        ("token_embd_norm.bias", None, "token_embd_norm.bias is missing"),
        ("blk.1.layer_output_norm.bias", None, "blk.1.layer_output_norm.bias is missing"),
        ("cls.output.weight", (70000, 2), r"cls.output.weight has shape \(70000, 2\)"),
        ("cls.output.weight", (1, 32), r"cls.output.weight has shape \(1, 32\)"),
        ("cls.norm.weight", (files.WIDTH,), "tensor cls.norm.weight is not part of a bert model"),
        ("blk.0.attn_norm_2.weight", (files.WIDTH,), "attn_norm_2.weight is not part"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, message: str
) -> None:
    tensors = _encoded()
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = np.zeros(shape, np.float32), Type.F32
    keys = files.encoder_keys(TinyEncoder())
    path = write_gguf(tmp_path / "bad.gguf", keys, tensors, architecture="bert")
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(path)
