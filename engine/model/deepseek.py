"""The builder of DeepSeek V2 and V3, and of what shares their graph (Kimi K2, GLM 4.7 Flash).

Latent attention, leading dense layers, then experts with a shared one and one of three gatings.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.model.metadata import ArchitectureKeys
from engine.model.readers import (
    read_dense_ffn,
    read_model,
    read_moe_ffn,
    read_num_layers,
    read_rope,
)
from engine.model.spec import (
    Activation,
    BlockSpec,
    DenseFfnSpec,
    Gating,
    LatentAttentionSpec,
    ModelSpec,
    MoeFfnSpec,
    RopePairing,
    RopeSpec,
)

# `expert_gating_func` of the file, llama.cpp's llama_expert_gating_func_type.
_GATINGS = {1: Gating.SOFTMAX, 2: Gating.SIGMOID, 3: Gating.CHOSEN_SOFTMAX}


def deepseek2(keys: ArchitectureKeys) -> ModelSpec:
    """Layers of latent attention, the first of them with a dense feed-forward."""
    keys.require("attention.clamp_kqv", 0.0)
    keys.require("nextn_predict_layers", 0)
    num_layers = read_num_layers(keys)
    num_dense = keys.uint("leading_dense_block_count", 0, least=0, most=num_layers)
    log_factor = 10.0 * keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    key_dim = _key_dim(keys)
    rope = read_rope(keys, RopePairing.NORM, key_dim)
    if rope.yarn_ramp is not None and log_factor:
        # Then the scores grow with the context, below, instead of queries and keys.
        rope = replace(rope, magnitude=keys.real("rope.scaling.attn_factor", 1.0))
    mixer = _attention(keys, key_dim, rope, log_factor)
    blocks = [BlockSpec(mixer, read_dense_ffn(keys))] * num_dense
    if num_dense < num_layers:
        moe = BlockSpec(mixer, _experts(keys, num_layers, num_dense))
        blocks += [moe] * (num_layers - num_dense)
    return read_model(keys, blocks, rope)


def _is_absorbed(keys: ArchitectureKeys) -> bool:
    """Files of before 2025 have one matrix for keys and values, and no lengths of MLA."""
    lengths = [keys.uint(f"attention.{name}_length_mla", 0, least=0) for name in ("key", "value")]
    if any(lengths) and not all(lengths):
        raise keys.error("attention.value_length_mla", lengths[1], "one beside key_length_mla")
    return all(lengths)


def _key_dim(keys: ArchitectureKeys) -> int:
    suffix = "_mla" if _is_absorbed(keys) else ""
    default = keys.uint("embedding_length") // keys.uint("attention.head_count")
    return keys.uint(f"attention.key_length{suffix}", default)


def _attention(
    keys: ArchitectureKeys, key_dim: int, rope: RopeSpec, log_factor: float
) -> LatentAttentionSpec:
    num_heads, is_absorbed = keys.uint("attention.head_count"), _is_absorbed(keys)
    latent_dim = keys.uint("attention.kv_lora_rank")
    if rope.dims >= key_dim:
        raise keys.error("rope.dimension_count", rope.dims, f"less than a key's {key_dim}")
    keys.require("attention.head_count_kv", 1 if is_absorbed else num_heads)
    if is_absorbed:
        keys.require("attention.key_length", latent_dim + rope.dims)
        keys.require("attention.value_length", latent_dim)
    suffix = "_mla" if is_absorbed else ""
    value_dim = keys.uint(f"attention.value_length{suffix}", key_dim)
    # The lite models have no such step, whatever the key says.
    has_rank = not keys.has_tensor("blk.0.attn_q.weight")
    keys.ignore("attention.q_lora_rank")
    return LatentAttentionSpec(
        num_heads=num_heads,
        latent_dim=latent_dim,
        nope_dim=key_dim - rope.dims,
        rope_dim=rope.dims,
        value_dim=value_dim,
        scale=_score_scale(key_dim, rope, log_factor),
        query_rank=keys.uint("attention.q_lora_rank") if has_rank else 0,
        is_absorbed=is_absorbed,
    )


def _score_scale(key_dim: int, rope: RopeSpec, log_factor: float) -> float:
    """Scores grow with the context's factor as llama.cpp's do, whatever the kind of scaling."""
    growth = -math.log(rope.position_scale)
    size = rope.magnitude if rope.yarn_ramp else rope.magnitude * (1.0 + 0.1 * growth)
    return (size * (1.0 + 0.1 * log_factor * growth)) ** 2 * key_dim**-0.5


def _experts(keys: ArchitectureKeys, num_layers: int, first: int) -> MoeFfnSpec:
    hidden = keys.uint("expert_feed_forward_length")
    ffn = read_moe_ffn(
        keys,
        hidden,
        gating=_gating(keys, num_layers),
        normalises=keys.flag("expert_weights_norm", False),
    )
    scale = keys.real("expert_weights_scale", 0.0)
    router = replace(
        ffn.router,
        scale=scale or 1.0,
        has_selection_bias=keys.has_tensor(f"blk.{first}.exp_probs_b.bias"),
    )
    return replace(
        ffn,
        router=router,
        is_fused=keys.has_tensor(f"blk.{first}.ffn_gate_up_exps.weight"),
        shared=DenseFfnSpec(hidden * keys.uint("expert_shared_count"), Activation.SILU),
    )


def _gating(keys: ArchitectureKeys, num_layers: int) -> Gating:
    number = keys.uint("expert_gating_func", 0, least=0)
    if number:
        if number not in _GATINGS:
            raise keys.error("expert_gating_func", number, "1, 2 or 3")
        return _GATINGS[number]
    # Files of before the key was: those of DeepSeek V2, and of GLM 4.7 Flash.
    is_glm = num_layers in (47, 48) and keys.vocab_size() == 154_880
    return Gating.SIGMOID if is_glm else Gating.SOFTMAX
