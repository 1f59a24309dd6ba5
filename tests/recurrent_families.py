"""Tiny random models of every recurrent family, written by the `gguf` package.

The same name gives the same bytes.

Example:
    path = write_recurrent(tmp_path / "tiny.gguf", "mamba2")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.families import byte_tokenizer
from tests.ggufs import FloatArray, write_gguf

WIDTH, HIDDEN, VOCAB, CONTEXT = 48, 40, 260, 512
EXPERTS = 4

_ATTENTION = {
    "attention.head_count": 4,
    "attention.key_length": 16,
    "attention.value_length": 16,
}
_SSM = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 72,
    "ssm.time_step_rank": 6,
    "ssm.state_size": 20,
    "ssm.group_count": 2,
}
_DELTA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 80,
    "ssm.time_step_rank": 4,
    "ssm.state_size": 20,
    "ssm.group_count": 2,
}
_MOE = {"expert_count": EXPERTS, "expert_used_count": 2}

# Of each family its keys, and of each layer what it mixes with.
FAMILIES: dict[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "mamba2": ({**_SSM, "feed_forward_length": 0, "attention.head_count": 0}, ("ssm",) * 3),
    "falcon-h1": (
        {**_ATTENTION, **_SSM, "attention.head_count_kv": 2},
        ("attention+ssm",) * 2,
    ),
    "granitehybrid": (
        {
            **_ATTENTION,
            **_SSM,
            "attention.head_count_kv": [0, 2, 0, 2],
            "rope.scaling.finetuned": False,
            "embedding_scale": 4.0,
            "residual_scale": 0.5,
            "logit_scale": 0.5,
            "attention.scale": 0.3,
        },
        ("ssm", "attention") * 2,
    ),
    "lfm2": (
        {**_ATTENTION, "attention.head_count_kv": [0, 0, 2, 0, 0, 2], "shortconv.l_cache": 3},
        ("conv", "conv", "attention") * 2,
    ),
    "qwen35": (
        {
            **_ATTENTION,
            **_DELTA,
            "attention.head_count_kv": 2,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
            "full_attention_interval": 3,
            "nextn_predict_layers": 1,
        },
        ("delta", "delta", "attention") * 2,
    ),
    "qwen3next": (
        {
            **_ATTENTION,
            **_DELTA,
            **_MOE,
            "attention.head_count_kv": 2,
            "rope.dimension_count": 8,
            "full_attention_interval": 2,
            "expert_feed_forward_length": HIDDEN,
            "expert_shared_feed_forward_length": HIDDEN,
        },
        ("delta", "attention"),
    ),
}


def write_recurrent(path: Path, name: str, *, has_tokenizer: bool = False) -> Path:
    """Writes a family's model."""
    keys, mixers = FAMILIES[name]
    num_unused = keys.get("nextn_predict_layers", 0)
    given = {
        "context_length": CONTEXT,
        "embedding_length": WIDTH,
        "block_count": len(mixers) + num_unused,
        "feed_forward_length": HIDDEN,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **keys,
    }
    rng = np.random.default_rng(0)
    tensors = _outside(rng, name)
    for layer, mixer in enumerate(mixers):
        for own, values in _layer(rng, name, mixer).items():
            tensors[f"blk.{layer}.{own}"] = values
    for layer in range(len(mixers), len(mixers) + num_unused):
        tensors[f"blk.{layer}.nextn.eh_proj.weight"] = _matrix(rng, WIDTH, 2 * WIDTH)
    stored = {own: (values, Type.F32) for own, values in tensors.items()}
    present = {f"{name}.{key}": value for key, value in given.items()}
    if has_tokenizer:
        present |= byte_tokenizer(VOCAB)
    return write_gguf(path, present, stored, architecture=name)


def _matrix(rng: np.random.Generator, *shape: int) -> FloatArray:
    return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)


def _vector(rng: np.random.Generator, *shape: int, mean: float = 0.0) -> FloatArray:
    return np.float32(mean) + rng.standard_normal(shape, np.float32) / np.float32(5)


def _outside(rng: np.random.Generator, name: str) -> dict[str, FloatArray]:
    norm = "token_embd_norm" if name == "lfm2" else "output_norm"
    return {
        "token_embd.weight": 3 * _matrix(rng, VOCAB, WIDTH),
        "output.weight": 3 * _matrix(rng, VOCAB, WIDTH),
        f"{norm}.weight": _vector(rng, WIDTH, mean=1),
    }


def _layer(rng: np.random.Generator, name: str, mixer: str) -> dict[str, FloatArray]:
    found = {"attn_norm.weight": _vector(rng, WIDTH, mean=1)}
    for part in mixer.split("+"):
        found |= _MIXERS[part](rng, name)
    if name == "mamba2":
        return found
    norm = {"falcon-h1": "ffn_norm", "qwen35": "post_attention_norm.weight"}
    norm["qwen3next"] = norm["qwen35"]
    found[norm.get(name, "ffn_norm.weight")] = _vector(rng, WIDTH, mean=1)
    return found | (_experts(rng) if name == "qwen3next" else _ffn(rng, ""))


def _ffn(rng: np.random.Generator, suffix: str) -> dict[str, FloatArray]:
    return {
        f"ffn_gate{suffix}.weight": _matrix(rng, HIDDEN, WIDTH),
        f"ffn_up{suffix}.weight": _matrix(rng, HIDDEN, WIDTH),
        f"ffn_down{suffix}.weight": _matrix(rng, WIDTH, HIDDEN),
    }


def _experts(rng: np.random.Generator) -> dict[str, FloatArray]:
    return _ffn(rng, "_shexp") | {
        "ffn_gate_inp.weight": _matrix(rng, EXPERTS, WIDTH),
        "ffn_gate_inp_shexp.weight": _vector(rng, WIDTH),
        "ffn_gate_exps.weight": _matrix(rng, EXPERTS, HIDDEN, WIDTH),
        "ffn_up_exps.weight": _matrix(rng, EXPERTS, HIDDEN, WIDTH),
        "ffn_down_exps.weight": _matrix(rng, EXPERTS, WIDTH, HIDDEN),
    }


def _attention(rng: np.random.Generator, name: str) -> dict[str, FloatArray]:
    rows = 128 if name.startswith("qwen") else 64  # a query, or a query and a gate
    found = {
        "attn_q.weight": _matrix(rng, rows, WIDTH),
        "attn_k.weight": _matrix(rng, 32, WIDTH),
        "attn_v.weight": _matrix(rng, 32, WIDTH),
        "attn_output.weight": _matrix(rng, WIDTH, 64),
    }
    if name in ("lfm2", "qwen35", "qwen3next"):
        found["attn_q_norm.weight"] = _vector(rng, 16, mean=1)
        found["attn_k_norm.weight"] = _vector(rng, 16, mean=1)
    return found


def _ssm(rng: np.random.Generator, name: str) -> dict[str, FloatArray]:
    return {
        "ssm_in.weight": _matrix(rng, 72 + 152 + 6, WIDTH),
        "ssm_conv1d.weight": _matrix(rng, 152, 4),
        "ssm_conv1d.bias": _vector(rng, 152),
        "ssm_dt.bias": _vector(rng, 6),
        "ssm_a": -np.exp(_vector(rng, 6, 1)),
        "ssm_d": _vector(rng, 6, 1, mean=1),
        "ssm_norm.weight": _vector(rng, 2, 36, mean=1),
        "ssm_out.weight": _matrix(rng, WIDTH, 72),
    }


def _conv(rng: np.random.Generator, name: str) -> dict[str, FloatArray]:
    return {
        "shortconv.in_proj.weight": _matrix(rng, 3 * WIDTH, WIDTH),
        "shortconv.conv.weight": _matrix(rng, WIDTH, 3),
        "shortconv.out_proj.weight": _matrix(rng, WIDTH, WIDTH),
    }


def _delta(rng: np.random.Generator, name: str) -> dict[str, FloatArray]:
    found = {
        "attn_qkv.weight": _matrix(rng, 160, WIDTH),
        "attn_gate.weight": _matrix(rng, 80, WIDTH),
        "ssm_conv1d.weight": _matrix(rng, 160, 4),
        "ssm_dt.bias": _vector(rng, 4),
        "ssm_a": -np.exp(_vector(rng, 4)),
        "ssm_norm.weight": _vector(rng, 20, mean=1),
        "ssm_out.weight": _matrix(rng, WIDTH, 80),
    }
    if name == "qwen3next":
        return found | {"ssm_ba.weight": _matrix(rng, 8, WIDTH)}
    return found | {
        "ssm_beta.weight": _matrix(rng, 4, WIDTH),
        "ssm_alpha.weight": _matrix(rng, 4, WIDTH),
    }


_MIXERS = {"attention": _attention, "ssm": _ssm, "conv": _conv, "delta": _delta}
