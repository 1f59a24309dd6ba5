"""From a file's metadata to a `ModelSpec`: one builder per architecture, in one table.

A key that llama.cpp understands, that changes the maths and that no builder here reads refuses the
file by name: a model is run as it was meant to be run or not at all. Keys that llama.cpp does not
know are ignored, as it ignores them.

Source of every default below: the `load_arch_hparams` of llama.cpp's model of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.errors import UnsupportedModel
from engine.gguf.reader import GgufFile
from engine.model.deepseek import deepseek2
from engine.model.encoder_architectures import bert, nomic_bert
from engine.model.encoder_spec import ScoredState
from engine.model.metadata import ArchitectureKeys
from engine.model.readers import (
    read_attention,
    read_dense_ffn,
    read_moe_ffn,
    read_rope,
    read_scoring,
    read_uniform_model,
    read_window,
    refuse_partial_rope,
    windowed,
    with_long_factors,
)
from engine.model.recurrent_architectures import (
    falcon_h1,
    granitehybrid,
    lfm2,
    mamba2,
    qwen3next,
    qwen35,
)
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    Gating,
    ModelSpec,
    QkNorm,
    RopePairing,
    RopeSpec,
)


def read_spec(file: GgufFile) -> ModelSpec:
    """Reads what the model computes.

    Raises:
        UnsupportedModel: The file is no model, or its architecture or a key that changes its
            maths is not implemented.
        ModelFileError: A key is missing or has the wrong type.
    """
    if file.metadata.get_str("general.type", "model") == "adapter":
        raise UnsupportedModel(file.name, "is an adapter, not a model; use --lora")
    name = file.metadata.get_str("general.architecture")
    build = _BUILDERS.get(name)
    if build is None:
        known = ", ".join(sorted(_BUILDERS))
        raise UnsupportedModel(
            file.name, f"general.architecture {name!r} is not supported (supported: {known})"
        )
    keys = ArchitectureKeys(file, name)
    spec = build(keys)
    keys.refuse_unread()
    return spec


def _llama(keys: ArchitectureKeys) -> ModelSpec:
    """Llama 1 to 3, Mistral, SmolLM2 and their many tunes; Mixtral, which has experts.

    `attention.sliding_window`, which old Mistral files carry, is not used by llama.cpp for this
    architecture, so it is not used here.
    """
    keys.ignore("attention.sliding_window")
    if keys.uint("expert_count", 0, least=0):
        ffn = read_moe_ffn(keys, keys.uint("feed_forward_length"), normalises=True)
    else:
        keys.require("expert_used_count", 0)
        ffn = read_dense_ffn(keys)
    spec = read_uniform_model(keys, BlockSpec(read_attention(keys), ffn), RopePairing.NORM)
    refuse_partial_rope(keys, spec)
    if keys.text("rope.scaling.type", "linear") == "longrope":
        return with_long_factors(keys, spec)
    if not keys.has_tensor("rope_freqs.weight"):
        return spec
    return replace(spec, ropes=(replace(spec.ropes[0], factors="rope_freqs.weight"),))


def _qwen2(keys: ArchitectureKeys) -> ModelSpec:
    """Qwen 1.5, 2 and 2.5: biases on queries, keys and values."""
    block = BlockSpec(read_attention(keys), read_dense_ffn(keys))
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    refuse_partial_rope(keys, spec)
    return spec


def _qwen3(keys: ArchitectureKeys) -> ModelSpec:
    """Dense Qwen 3: queries and keys are normalised per head. Its rerankers have shares as scores."""
    block = BlockSpec(read_attention(keys, QkNorm.HEAD), read_dense_ffn(keys))
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    refuse_partial_rope(keys, spec)
    scoring = read_scoring(keys, ScoredState.LAST)
    return replace(spec, scoring=replace(scoring, is_softmax=True) if scoring else None)


def _qwen3moe(keys: ArchitectureKeys) -> ModelSpec:
    """Qwen 3 with experts."""
    keys.ignore("feed_forward_length", "expert_shared_feed_forward_length")
    hidden = keys.uint("expert_feed_forward_length", 0, least=0)
    if not hidden:
        hidden = keys.uint("feed_forward_length") // keys.uint("expert_used_count")
    ffn = read_moe_ffn(keys, hidden, normalises=True)
    block = BlockSpec(read_attention(keys, QkNorm.HEAD), ffn)
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    refuse_partial_rope(keys, spec)
    return spec


def _olmo2(keys: ArchitectureKeys) -> ModelSpec:
    """OLMo 2 and 3: norms after the mixer and the feed-forward only, and over whole projections.

    The window layers of OLMo 3 use plain rope, whatever scales the others.
    """
    block = BlockSpec(
        read_attention(keys, QkNorm.FULL),
        read_dense_ffn(keys),
        has_pre_norms=False,
        has_post_norms=True,
    )
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    refuse_partial_rope(keys, spec)
    window = read_window(keys, 0)
    if not window:
        return spec
    # Read for its check alone: llama.cpp turns the window layers with the full layers' base.
    keys.ignore("rope.freq_base_swa")
    local = replace(spec.ropes[0], position_scale=1.0, magnitude=1.0, yarn_ramp=None)
    return windowed(keys, spec, window, local, period=4)


def _olmoe(keys: ArchitectureKeys) -> ModelSpec:
    """OLMoE: norms over whole projections, weights of experts as the softmax gives them."""
    ffn = read_moe_ffn(keys, keys.uint("feed_forward_length"))
    block = BlockSpec(read_attention(keys, QkNorm.FULL), ffn)
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    refuse_partial_rope(keys, spec)
    return spec


def _gemma2(keys: ArchitectureKeys) -> ModelSpec:
    """Gemma 2: norms on both sides, soft-caps, every other layer slides."""
    mixer = _gemma_attention(keys, QkNorm.NONE, is_widest=keys.uint("block_count") == 46)
    mixer = replace(mixer, soft_cap=keys.real("attn_logit_softcapping", 50.0))
    spec = _gemma(keys, mixer, logit_soft_cap=keys.real("final_logit_softcapping", 30.0))
    return windowed(keys, spec, read_window(keys, 4096, least=1), _local_rope(keys, spec), period=2)


def _gemma3(keys: ArchitectureKeys) -> ModelSpec:
    """Gemma 3 text: as Gemma 2 with normalised queries and keys, five of six layers slide."""
    mixer = _gemma_attention(keys, QkNorm.HEAD, is_widest=keys.uint("block_count") == 62)
    spec = _gemma(keys, mixer, logit_soft_cap=keys.real("final_logit_softcapping", 0.0))
    window = read_window(keys, 0)
    if not window:
        return spec
    local = replace(
        spec.ropes[0],
        base=keys.positive("rope.freq_base_swa", 10000.0),
        position_scale=1.0,
        magnitude=keys.real("rope.scaling.attn_factor", 1.0),
        yarn_ramp=None,
    )
    return windowed(keys, spec, window, local, period=6)


def _phi3(keys: ArchitectureKeys) -> ModelSpec:
    """Phi 3 and 4: fused projections, rope factors for a short and a long context.

    `attention.sliding_window` is switched off in llama.cpp for this architecture.
    """
    keys.ignore("attention.sliding_window")
    block = BlockSpec(read_attention(keys), read_dense_ffn(keys, is_fused=True))
    return with_long_factors(keys, read_uniform_model(keys, block, RopePairing.NEOX))


def _gpt_oss(keys: ArchitectureKeys) -> ModelSpec:
    """OpenAI's open models: sinks, biases everywhere, experts by softmax of the chosen.

    `feed_forward_length` is an expert's too, and llama.cpp does not read it.
    """
    keys.ignore("feed_forward_length")
    ffn = read_moe_ffn(
        keys,
        keys.uint("expert_feed_forward_length"),
        gating=Gating.CHOSEN_SOFTMAX,
        activation=Activation.CLAMPED_SWIGLU,
    )
    mixer = replace(read_attention(keys), has_sinks=True)
    block = BlockSpec(mixer, ffn, ffn_norm="post_attention_norm.weight")
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    refuse_partial_rope(keys, spec)
    return windowed(keys, spec, read_window(keys, None, least=1), _local_rope(keys, spec), period=2)


def _local_rope(keys: ArchitectureKeys, spec: ModelSpec) -> RopeSpec:
    """The rope of window layers that differs in its base alone."""
    full = spec.ropes[0]
    base = keys.positive("rope.freq_base_swa", full.base)
    return read_rope(keys, full.pairing, spec.kv.key_dim, base)


def _gemma_attention(keys: ArchitectureKeys, qk_norm: QkNorm, *, is_widest: bool) -> AttentionSpec:
    """Attention of Gemma 2 or 3; the largest model of each scales scores by its width's share."""
    mixer = read_attention(keys, qk_norm)
    if not is_widest:
        return mixer
    width, num_heads = keys.uint("embedding_length"), mixer.num_heads
    if num_heads > width:
        raise keys.error("attention.head_count", num_heads, f"up to {width}, the model's width,")
    share = width // num_heads
    return replace(mixer, scale=share**-0.5)


def _gemma(keys: ArchitectureKeys, mixer: AttentionSpec, *, logit_soft_cap: float) -> ModelSpec:
    block = BlockSpec(mixer, read_dense_ffn(keys, Activation.GELU), has_post_norms=True)
    spec = read_uniform_model(keys, block, RopePairing.NEOX)
    return replace(spec, embedding_scale=spec.width**0.5, logit_soft_cap=logit_soft_cap)


_BUILDERS: dict[str, Callable[[ArchitectureKeys], ModelSpec]] = {
    "bert": bert,
    "deepseek2": deepseek2,
    "falcon-h1": falcon_h1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "granitehybrid": granitehybrid,
    "lfm2": lfm2,
    "llama": _llama,
    "mamba2": mamba2,
    "nomic-bert": nomic_bert,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen35": qwen35,
    "qwen3next": qwen3next,
    "qwen3moe": _qwen3moe,
}
