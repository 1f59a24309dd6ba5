"""Seeded models that no wheel has, made into the cache: experts of gpt-oss's kind, and mamba2.

Their numbers mean nothing; their layouts, sizes and the skew of their routers are those of real
ones. A file is made once, under a name that says how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from tests.families import byte_tokenizer
from tests.ggufs import random_blocks, write_gguf

_VOCAB, _CONTEXT = 2048, 4096
Tensors = dict[str, tuple[npt.NDArray[Any], Type]]

# 12 layers of 32 experts, 256 MB of them; a token uses 4 of a layer.
_WIDTH, _HEADS, _KV_HEADS, _HEAD_DIM = 512, 8, 2, 64
_LAYERS, _EXPERTS, _USED, _HIDDEN = 12, 32, 4, 768
# Of a Zipf law: the k-th most popular expert of a layer is chosen in proportion to k ** -this.
_SKEW = 1.0

_MAMBA = {"conv_kernel": 4, "inner_size": 1024, "time_step_rank": 16, "state_size": 128}
_MAMBA_WIDTH, _MAMBA_LAYERS = 512, 12


def experts_model(folder: Path, kind: Type) -> Path:
    """A gpt-oss with experts of a type, 200 MB or more."""
    return _made(folder / f"experts-{kind.name.lower()}-1.gguf", lambda: _experts(kind), "gpt-oss")


def mamba_model(folder: Path) -> Path:
    """A mamba2."""
    return _made(folder / "mamba2-1.gguf", _mamba, "mamba2")


def _made(
    path: Path, make: Callable[[], tuple[Mapping[str, Any], Tensors]], architecture: str
) -> Path:
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        keys, tensors = make()
        present = {f"{architecture}.{name}": value for name, value in keys.items()}
        partial = path.with_suffix(".partial")
        write_gguf(
            partial, present | byte_tokenizer(_VOCAB), tensors, architecture=architecture
        ).replace(path)
    return path


def _experts(kind: Type) -> tuple[Mapping[str, Any], Tensors]:
    rng = np.random.default_rng(0)
    keys = {
        "context_length": _CONTEXT,
        "embedding_length": _WIDTH,
        "block_count": _LAYERS,
        "feed_forward_length": _HIDDEN,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "attention.key_length": _HEAD_DIM,
        "attention.value_length": _HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 128,
        "rope.freq_base": 150000.0,
        "expert_count": _EXPERTS,
        "expert_used_count": _USED,
        "expert_feed_forward_length": _HIDDEN,
    }
    queries, own = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    matrices = {
        "attn_q": (queries, _WIDTH),
        "attn_k": (own, _WIDTH),
        "attn_v": (own, _WIDTH),
        "attn_output": (_WIDTH, queries),
    }
    stacks = {
        "ffn_gate_exps": (_EXPERTS, _HIDDEN, _WIDTH),
        "ffn_up_exps": (_EXPERTS, _HIDDEN, _WIDTH),
        "ffn_down_exps": (_EXPERTS, _WIDTH, _HIDDEN),
    }
    tensors = _outside(rng, _WIDTH)
    for layer in range(_LAYERS):
        block: Tensors = {}
        for name, shape in matrices.items():
            block[f"{name}.weight"] = _blocks(rng, Type.Q8_0, shape)
            block[f"{name}.bias"] = _floats(rng, shape[0])
        for name, shape in stacks.items():
            block[f"{name}.weight"] = _blocks(rng, kind, shape)
            block[f"{name}.bias"] = _floats(rng, *shape[:2])
        for name in ("attn_norm", "post_attention_norm"):
            block[f"{name}.weight"] = np.ones(_WIDTH, np.float32), Type.F32
        block["attn_sinks.weight"] = _floats(rng, _HEADS)
        block["ffn_gate_inp.weight"] = _floats(rng, _EXPERTS, _WIDTH)
        block["ffn_gate_inp.bias"] = _popularity(rng), Type.F32
        tensors |= {f"blk.{layer}.{name}": value for name, value in block.items()}
    return keys, tensors


def _popularity(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Biases of a router by which each layer has favourites of its own."""
    ranks = 1 + rng.permutation(_EXPERTS)
    return (-_SKEW * np.log(ranks)).astype(np.float32)


def _mamba() -> tuple[Mapping[str, Any], Tensors]:
    rng = np.random.default_rng(0)
    inner, ranks, state = (_MAMBA[name] for name in ("inner_size", "time_step_rank", "state_size"))
    channels = inner + 2 * state
    keys = {
        "context_length": _CONTEXT,
        "embedding_length": _MAMBA_WIDTH,
        "block_count": _MAMBA_LAYERS,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.group_count": 1,
        **{f"ssm.{name}": value for name, value in _MAMBA.items()},
    }
    tensors = _outside(rng, _MAMBA_WIDTH)
    for layer in range(_MAMBA_LAYERS):
        block: Tensors = {
            "attn_norm.weight": (np.ones(_MAMBA_WIDTH, np.float32), Type.F32),
            "ssm_in.weight": _blocks(rng, Type.Q8_0, (inner + channels + ranks, _MAMBA_WIDTH)),
            "ssm_out.weight": _blocks(rng, Type.Q8_0, (_MAMBA_WIDTH, inner)),
            "ssm_conv1d.weight": _floats(rng, channels, _MAMBA["conv_kernel"]),
            "ssm_conv1d.bias": _floats(rng, channels),
            "ssm_dt.bias": _floats(rng, ranks),
            "ssm_a": (-rng.uniform(0.5, 2, (ranks, 1)).astype(np.float32), Type.F32),
            "ssm_d": _floats(rng, ranks, 1),
            "ssm_norm.weight": (np.ones((1, inner), np.float32), Type.F32),
        }
        tensors |= {f"blk.{layer}.{name}": value for name, value in block.items()}
    return keys, tensors


def _outside(rng: np.random.Generator, width: int) -> Tensors:
    return {
        "token_embd.weight": _blocks(rng, Type.Q8_0, (_VOCAB, width)),
        "output.weight": _blocks(rng, Type.Q8_0, (_VOCAB, width)),
        "output_norm.weight": (np.ones(width, np.float32), Type.F32),
    }


def _blocks(
    rng: np.random.Generator, kind: Type, shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.uint8], Type]:
    return random_blocks(rng, kind, shape, std=shape[-1] ** -0.5), kind


def _floats(rng: np.random.Generator, *shape: int) -> tuple[npt.NDArray[np.float32], Type]:
    return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5), Type.F32
