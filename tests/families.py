"""Tiny random models of every dense family, written by the `gguf` package.

`FAMILIES` says what a family's files have that a llama's have not; variants are made from it by
`dataclasses.replace`. The same model gives the same bytes.

Example:
    model = replace(FAMILIES["gemma3"], num_layers=12)
    path = write_family(tmp_path / "tiny.gguf", model)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.ggufs import FloatArray, write_gguf

WIDTH, NUM_HEADS, NUM_KV_HEADS, HIDDEN, VOCAB = 64, 4, 2, 96, 300
CONTEXT, SHORT_CONTEXT = 512, 256
WINDOW = 24


@dataclass(frozen=True)
class TinyModel:
    """A decoder whose weights are all float32.

    `keys` are hyperparameters beside those that every family has, without the architecture's
    prefix. `biases` names matrices. `is_fused`: queries, keys and values are one matrix, and so are
    gate and up. `rope_factors` names vectors.
    """

    architecture: str
    num_layers: int = 3
    head_dim: int = WIDTH // NUM_HEADS
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    biases: tuple[str, ...] = ()
    is_fused: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    rope_factors: tuple[str, ...] = ()
    tied_head: bool = False


FAMILIES = {
    model.architecture: model
    for model in (
        TinyModel("llama"),
        TinyModel("qwen2", biases=("attn_q", "attn_k", "attn_v", "output")),
        TinyModel("qwen3", head_dim=32, qk_norm="head", tied_head=True),
        TinyModel(
            "gemma2",
            num_layers=4,
            has_post_norms=True,
            tied_head=True,
            keys={
                "attention.sliding_window": WINDOW,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 5.0,
            },
        ),
        TinyModel(
            "gemma3",
            num_layers=7,
            has_post_norms=True,
            qk_norm="head",
            tied_head=True,
            keys={
                "attention.sliding_window": WINDOW,
                "rope.freq_base": 1e6,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
        ),
        TinyModel(
            "phi3",
            is_fused=True,
            rope_factors=("rope_factors_short", "rope_factors_long"),
            keys={
                "attention.sliding_window": WINDOW,  # not used
                "rope.dimension_count": 12,
                "rope.scaling.original_context_length": SHORT_CONTEXT,
                "rope.scaling.attn_factor": 1.19,
            },
        ),
        TinyModel(
            "olmo2",
            has_pre_norms=False,
            has_post_norms=True,
            qk_norm="full",
            keys={
                "attention.sliding_window": WINDOW,
                "attention.sliding_window_pattern": [True, False, True],
                "rope.scaling.factor": 4.0,
                "rope.scaling.attn_factor": 1.1,
            },
        ),
    )
}


def write_family(
    path: Path, model: TinyModel, extra: Mapping[str, FloatArray] | None = None
) -> Path:
    """Writes a model without a tokenizer, and `extra` tensors; a key of None is left out."""
    keys = {f"{model.architecture}.{name}": value for name, value in _keys(model).items()}
    present = {name: value for name, value in keys.items() if value is not None}
    tensors = family_tensors(model) | dict(extra or {})
    stored = {name: (values, Type.F32) for name, values in tensors.items()}
    return write_gguf(path, present, stored, architecture=model.architecture)


def _keys(model: TinyModel) -> dict[str, Any]:
    return {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": model.num_layers,
        "feed_forward_length": HIDDEN,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **model.keys,
    }


def family_tensors(model: TinyModel) -> dict[str, FloatArray]:
    """The weights by their names in the file."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int, std: float | None = None) -> FloatArray:
        return rng.standard_normal((rows, cols), np.float32) * np.float32(std or cols**-0.5)

    def vector(length: int, mean: float = 0.0) -> FloatArray:
        return np.float32(mean) + rng.standard_normal(length, np.float32) / np.float32(5)

    head_std = 3 * WIDTH**-0.5  # logits of standard deviation 3
    tensors = {"token_embd.weight": matrix(VOCAB, WIDTH, head_std)}
    if not model.tied_head:
        tensors["output.weight"] = matrix(VOCAB, WIDTH, head_std)
    tensors["output_norm.weight"] = vector(WIDTH, 1)
    for layer in range(model.num_layers):
        for name, shape in _matrices(model).items():
            tensors[f"blk.{layer}.{name}.weight"] = matrix(*shape)
        for name, length in _norms(model).items():
            tensors[f"blk.{layer}.{name}.weight"] = vector(length, 1)
    for name, values in list(tensors.items()):
        if name.removesuffix(".weight").rpartition(".")[2] in model.biases:
            tensors[name.replace("weight", "bias")] = vector(len(values))
    for index, name in enumerate(model.rope_factors):
        dims = model.keys.get("rope.dimension_count", model.head_dim)
        tensors[f"{name}.weight"] = np.linspace(1, 2 + 6 * index, dims // 2, dtype=np.float32)
    return tensors


def _matrices(model: TinyModel) -> dict[str, tuple[int, int]]:
    """The matrices of a block: name to (rows, cols)."""
    queries, keys = NUM_HEADS * model.head_dim, NUM_KV_HEADS * model.head_dim
    outputs = {"attn_output": (WIDTH, queries), "ffn_down": (WIDTH, HIDDEN)}
    if model.is_fused:
        return {"attn_qkv": (queries + 2 * keys, WIDTH), "ffn_up": (2 * HIDDEN, WIDTH)} | outputs
    projections = {"attn_q": (queries, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)}
    return projections | {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH)} | outputs


def _norms(model: TinyModel) -> dict[str, int]:
    """The norms of a block: name to length."""
    norms: dict[str, int] = {}
    if model.has_pre_norms:
        norms |= {"attn_norm": WIDTH, "ffn_norm": WIDTH}
    if model.has_post_norms:
        norms |= {"post_attention_norm": WIDTH, "post_ffw_norm": WIDTH}
    if model.qk_norm == "head":
        norms |= {"attn_q_norm": model.head_dim, "attn_k_norm": model.head_dim}
    if model.qk_norm == "full":
        norms["attn_q_norm"] = NUM_HEADS * model.head_dim
        norms["attn_k_norm"] = NUM_KV_HEADS * model.head_dim
    return norms
