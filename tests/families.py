"""Tiny random models of every family, written by the `gguf` package.

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
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from tests.ggufs import FloatArray, encode, write_gguf

WIDTH, NUM_HEADS, NUM_KV_HEADS, HIDDEN, VOCAB = 64, 4, 2, 96, 300
CONTEXT, SHORT_CONTEXT = 512, 256
WINDOW = 24


@dataclass(frozen=True)
class TinyExperts:
    """Feed-forwards with `count` experts, of which `used` run; the first layers may be dense.

    `shared` counts experts that run always. `is_fused`: gate and up are one stack. `has_biases`:
    the router and all stacks have one.
    """

    used: int
    count: int = 8
    hidden: int = 32
    num_dense: int = 0
    shared: int = 0
    is_fused: bool = False
    has_biases: bool = False
    has_selection_bias: bool = False


@dataclass(frozen=True)
class TinyLatent:
    """Latent attention; a key has `nope` components of its own and `rope` shared ones.

    `query_rank` 0: queries come from one matrix. Unless `is_split`, one matrix makes all keys and
    values, as in files of before 2025.
    """

    rank: int = 32
    nope: int = 16
    rope: int = 8
    value: int = 12
    query_rank: int = 24
    is_split: bool = True


@dataclass(frozen=True)
class TinyModel:
    """A decoder whose weights are all float32.

    `keys` are hyperparameters beside those that every family has, without the architecture's
    prefix. `biases` names matrices. `is_fused`: queries, keys and values are one matrix, and so are
    gate and up. `rope_factors` names vectors. `ffn_norm` is the one before the feed-forward.
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
    experts: TinyExperts | None = None
    latent: TinyLatent | None = None
    has_sinks: bool = False
    ffn_norm: str = "ffn_norm"


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
        TinyModel("qwen3moe", head_dim=32, qk_norm="head", experts=TinyExperts(used=2)),
        TinyModel("olmoe", qk_norm="full", experts=TinyExperts(used=3)),
        TinyModel(
            "gpt-oss",
            num_layers=4,
            head_dim=32,
            biases=("attn_q", "attn_k", "attn_v", "attn_output"),
            has_sinks=True,
            ffn_norm="post_attention_norm",
            experts=TinyExperts(used=4, has_biases=True),
            keys={
                "attention.sliding_window": WINDOW,
                "rope.freq_base": 150000.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": SHORT_CONTEXT,
                "rope.scaling.yarn_beta_fast": 16.0,  # not used
            },
        ),
        TinyModel(
            "deepseek2",
            latent=TinyLatent(),
            experts=TinyExperts(used=3, num_dense=1, shared=2, has_selection_bias=True),
            keys={
                "expert_gating_func": 2,
                "expert_weights_norm": True,
                "expert_weights_scale": 2.5,
                "expert_group_count": 4,
                "expert_group_used_count": 2,
            },
        ),
    )
}


def write_family(
    path: Path,
    model: TinyModel,
    extra: Mapping[str, FloatArray] | None = None,
    *,
    has_tokenizer: bool = False,
    ggml_type: Type = Type.F32,
) -> Path:
    """Writes a model, and `extra` tensors; a key of None is left out.

    Matrices whose rows are whole blocks of `ggml_type` are of it, all else is float32.
    """
    keys = {f"{model.architecture}.{name}": value for name, value in _keys(model).items()}
    present = {name: value for name, value in keys.items() if value is not None}
    if has_tokenizer:
        present |= byte_tokenizer(VOCAB)
    tensors = family_tensors(model) | dict(extra or {})
    types = {name: _type_of(name, values, ggml_type) for name, values in tensors.items()}
    stored = {name: (encode(tensors[name], kind), kind) for name, kind in types.items()}
    return write_gguf(path, present, stored, architecture=model.architecture)


def _type_of(name: str, values: FloatArray, wanted: Type) -> Type:
    is_matrix = values.ndim > 1 and name.endswith(".weight") and "_inp." not in name
    fits = values.shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0
    return wanted if is_matrix and fits else Type.F32


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """SentencePiece: specials, the bytes, and words that nothing is merged into; at least 259."""
    num_words = vocab_size - 259
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *(f"word{index}" for index in range(num_words)),
        ],
        "tokenizer.ggml.scores": [0.0] * vocab_size,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * num_words],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


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
        **_expert_keys(model),
        **_latent_keys(model),
        **model.keys,
    }


def _expert_keys(model: TinyModel) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    keys = {"expert_count": experts.count, "expert_used_count": experts.used}
    if model.architecture in ("llama", "olmoe"):
        return keys | {"feed_forward_length": experts.hidden}
    keys["expert_feed_forward_length"] = experts.hidden
    if experts.shared:
        keys["expert_shared_count"] = experts.shared
    if experts.num_dense:
        keys["leading_dense_block_count"] = experts.num_dense
    return keys


def _latent_keys(model: TinyModel) -> dict[str, Any]:
    latent = model.latent
    if latent is None:
        return {}
    keys = {"attention.kv_lora_rank": latent.rank, "rope.dimension_count": latent.rope}
    if latent.query_rank:
        keys["attention.q_lora_rank"] = latent.query_rank
    key, value = latent.nope + latent.rope, latent.value
    if not latent.is_split:
        kept = {"attention.key_length": key, "attention.value_length": value}
        return keys | kept | {"attention.head_count_kv": NUM_HEADS}
    kept = {
        "attention.key_length": latent.rank + latent.rope,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
    }
    return keys | kept | {"attention.head_count_kv": 1}


def family_tensors(model: TinyModel) -> dict[str, FloatArray]:
    """The weights by their names in the file."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int, std: float | None = None) -> FloatArray:
        return rng.standard_normal(shape, np.float32) * np.float32(std or shape[-1] ** -0.5)

    def vector(length: int, mean: float = 0.0) -> FloatArray:
        return np.float32(mean) + rng.standard_normal(length, np.float32) / np.float32(5)

    head_std = 3 * WIDTH**-0.5  # logits of standard deviation 3
    tensors = {"token_embd.weight": matrix(VOCAB, WIDTH, std=head_std)}
    if not model.tied_head:
        tensors["output.weight"] = matrix(VOCAB, WIDTH, std=head_std)
    tensors["output_norm.weight"] = vector(WIDTH, 1)
    for layer in range(model.num_layers):
        for name, shape in _matrices(model, layer).items():
            tensors[f"blk.{layer}.{name}.weight"] = matrix(*shape)
        for name, length in _norms(model).items():
            tensors[f"blk.{layer}.{name}.weight"] = vector(length, 1)
        for name, shape in _further(model, layer).items():
            tensors[f"blk.{layer}.{name}"] = matrix(*shape, std=0.3)
    for name, values in list(tensors.items()):
        if name.removesuffix(".weight").rpartition(".")[2] in model.biases:
            tensors[name.replace("weight", "bias")] = vector(len(values))
    for index, name in enumerate(model.rope_factors):
        dims = model.keys.get("rope.dimension_count", model.head_dim)
        tensors[f"{name}.weight"] = np.linspace(1, 2 + 6 * index, dims // 2, dtype=np.float32)
    return tensors


def _matrices(model: TinyModel, layer: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a block: name to (rows, cols), with a count before them for a stack."""
    mixer = _latent_matrices(model.latent) if model.latent else _attention_matrices(model)
    if model.experts and layer >= model.experts.num_dense:
        return mixer | _expert_matrices(model.experts)
    ffn = _dense_matrices(HIDDEN)
    if model.is_fused:
        ffn = {"ffn_up": (2 * HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN)}
    return mixer | ffn


def _attention_matrices(model: TinyModel) -> dict[str, tuple[int, ...]]:
    queries, keys = NUM_HEADS * model.head_dim, NUM_KV_HEADS * model.head_dim
    output = {"attn_output": (WIDTH, queries)}
    if model.is_fused:
        return {"attn_qkv": (queries + 2 * keys, WIDTH)} | output
    return {"attn_q": (queries, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH)} | output


def _latent_matrices(latent: TinyLatent) -> dict[str, tuple[int, ...]]:
    queries, rank = NUM_HEADS * (latent.nope + latent.rope), latent.query_rank
    matrices: dict[str, tuple[int, ...]] = {
        "attn_kv_a_mqa": (latent.rank + latent.rope, WIDTH),
        "attn_output": (WIDTH, NUM_HEADS * latent.value),
    }
    if rank:
        matrices |= {"attn_q_a": (rank, WIDTH), "attn_q_b": (queries, rank)}
    else:
        matrices["attn_q"] = (queries, WIDTH)
    if latent.is_split:
        matrices["attn_k_b"] = (NUM_HEADS, latent.rank, latent.nope)
        matrices["attn_v_b"] = (NUM_HEADS, latent.value, latent.rank)
    else:
        matrices["attn_kv_b"] = (NUM_HEADS * (latent.nope + latent.value), latent.rank)
    return matrices


def _dense_matrices(hidden: int, suffix: str = "") -> dict[str, tuple[int, ...]]:
    names = {"ffn_gate": (hidden, WIDTH), "ffn_up": (hidden, WIDTH), "ffn_down": (WIDTH, hidden)}
    return {f"{name}{suffix}": shape for name, shape in names.items()}


def _expert_matrices(experts: TinyExperts) -> dict[str, tuple[int, ...]]:
    count, hidden = experts.count, experts.hidden
    matrices: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp": (count, WIDTH),
        "ffn_down_exps": (count, WIDTH, hidden),
    }
    if experts.is_fused:
        matrices["ffn_gate_up_exps"] = (count, 2 * hidden, WIDTH)
    else:
        matrices |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (count, hidden, WIDTH))
    if experts.shared:
        matrices |= _dense_matrices(experts.shared * hidden, "_shexp")
    return matrices


def _norms(model: TinyModel) -> dict[str, int]:
    """The norms of a block: name to length."""
    norms: dict[str, int] = {}
    if model.has_pre_norms:
        norms |= {"attn_norm": WIDTH, model.ffn_norm: WIDTH}
    if model.has_post_norms:
        norms |= {"post_attention_norm": WIDTH, "post_ffw_norm": WIDTH}
    if model.qk_norm == "head":
        norms |= {"attn_q_norm": model.head_dim, "attn_k_norm": model.head_dim}
    if model.qk_norm == "full":
        norms["attn_q_norm"] = NUM_HEADS * model.head_dim
        norms["attn_k_norm"] = NUM_KV_HEADS * model.head_dim
    if model.latent:
        norms["attn_kv_a_norm"] = model.latent.rank
        if model.latent.query_rank:
            norms["attn_q_a_norm"] = model.latent.query_rank
    return norms


def _further(model: TinyModel, layer: int) -> dict[str, tuple[int, ...]]:
    """What is neither a matrix nor a norm, by its whole name."""
    found: dict[str, tuple[int, ...]] = {}
    if model.has_sinks:
        found["attn_sinks.weight"] = (NUM_HEADS,)
    experts = model.experts
    if experts is None or layer < experts.num_dense:
        return found
    if experts.has_selection_bias:
        found["exp_probs_b.bias"] = (experts.count,)
    if experts.has_biases:
        stacks = {n: s[:2] for n, s in _expert_matrices(experts).items() if len(s) == 3}
        found |= {f"{name}.bias": shape for name, shape in stacks.items()}
        found["ffn_gate_inp.bias"] = (experts.count,)
    return found
