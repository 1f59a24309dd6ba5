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
from engine.model.metadata import ArchitectureKeys
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    LayerSpec,
    ModelSpec,
    QkNorm,
    RopePairing,
    RopeSpec,
)

_MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS; a damaged count must not become a tuple
_MAX_WINDOW = 2**30  # positions and ages are int32 on the device


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
    """Llama 1 to 3, Mistral, SmolLM2 and their many tunes.

    `attention.sliding_window`, which old Mistral files carry, is not used by llama.cpp for this
    architecture, so it is not used here.
    """
    keys.ignore("attention.sliding_window")
    keys.require("expert_count", 0)
    spec = _decoder(keys, _block(keys), RopePairing.NORM)
    _refuse_partial_rope(keys, spec)
    if keys.text("rope.scaling.type", "linear") == "longrope":
        return _with_long_factors(keys, spec)
    if not keys.has_tensor("rope_freqs.weight"):
        return spec
    return replace(spec, ropes=(replace(spec.ropes[0], factors="rope_freqs.weight"),))


def _qwen2(keys: ArchitectureKeys) -> ModelSpec:
    """Qwen 1.5, 2 and 2.5: biases on queries, keys and values."""
    spec = _decoder(keys, _block(keys), RopePairing.NEOX)
    _refuse_partial_rope(keys, spec)
    return spec


def _qwen3(keys: ArchitectureKeys) -> ModelSpec:
    """Dense Qwen 3: queries and keys are normalised per head."""
    spec = _decoder(keys, _block(keys, qk_norm=QkNorm.HEAD), RopePairing.NEOX)
    _refuse_partial_rope(keys, spec)
    return spec


def _olmo2(keys: ArchitectureKeys) -> ModelSpec:
    """OLMo 2 and 3: norms after the mixer and the feed-forward only, and over whole projections.

    The window layers of OLMo 3 use plain rope; its full layers' YaRN is not implemented.
    """
    block = replace(_block(keys, qk_norm=QkNorm.FULL), has_pre_norms=False, has_post_norms=True)
    spec = _decoder(keys, block, RopePairing.NEOX)
    _refuse_partial_rope(keys, spec)
    window = _window(keys, 0)
    if not window:
        return spec
    # Read for its check alone: llama.cpp turns the window layers with the full layers' base.
    keys.ignore("rope.freq_base_swa")
    local = replace(spec.ropes[0], position_scale=1.0, magnitude=1.0)
    return _windowed(keys, spec, window, local, period=4)


def _gemma2(keys: ArchitectureKeys) -> ModelSpec:
    """Gemma 2: norms on both sides, soft-caps, every other layer slides."""
    block = _gemma_block(keys, is_widest=keys.uint("block_count") == 46)
    cap = keys.real("attn_logit_softcapping", 50.0)
    block = replace(block, mixer=replace(block.mixer, soft_cap=cap))
    spec = _gemma(keys, block, logit_soft_cap=keys.real("final_logit_softcapping", 30.0))
    local = replace(spec.ropes[0], base=keys.positive("rope.freq_base_swa", spec.ropes[0].base))
    return _windowed(keys, spec, _window(keys, 4096, least=1), local, period=2)


def _gemma3(keys: ArchitectureKeys) -> ModelSpec:
    """Gemma 3 text: as Gemma 2 with normalised queries and keys, five of six layers slide."""
    block = _gemma_block(keys, is_widest=keys.uint("block_count") == 62)
    block = replace(block, mixer=replace(block.mixer, qk_norm=QkNorm.HEAD))
    spec = _gemma(keys, block, logit_soft_cap=keys.real("final_logit_softcapping", 0.0))
    window = _window(keys, 0)
    if not window:
        return spec
    base = keys.positive("rope.freq_base_swa", 10000.0)
    local = replace(spec.ropes[0], base=base, position_scale=1.0)
    return _windowed(keys, spec, window, local, period=6)


def _phi3(keys: ArchitectureKeys) -> ModelSpec:
    """Phi 3 and 4: fused projections, rope factors for a short and a long context.

    `attention.sliding_window` is switched off in llama.cpp for this architecture.
    """
    keys.ignore("attention.sliding_window")
    block = _block(keys, is_ffn_fused=True)
    return _with_long_factors(keys, _decoder(keys, block, RopePairing.NEOX))


def _gemma_block(keys: ArchitectureKeys, *, is_widest: bool) -> BlockSpec:
    """A block of Gemma 2 or 3; the largest model of each scales scores by its width's share."""
    block = replace(_block(keys, activation=Activation.GELU), has_post_norms=True)
    if not is_widest:
        return block
    width, num_heads = keys.uint("embedding_length"), block.mixer.num_heads
    if num_heads > width:
        raise keys.error("attention.head_count", num_heads, f"up to {width}, the model's width,")
    share = width // num_heads
    return replace(block, mixer=replace(block.mixer, scale=share**-0.5))


def _gemma(keys: ArchitectureKeys, block: BlockSpec, *, logit_soft_cap: float) -> ModelSpec:
    spec = _decoder(keys, block, RopePairing.NEOX)
    return replace(spec, embedding_scale=spec.width**0.5, logit_soft_cap=logit_soft_cap)


def _window(keys: ArchitectureKeys, default: int, *, least: int = 0) -> int:
    return keys.uint("attention.sliding_window", default, least=least, most=_MAX_WINDOW)


def _windowed(
    keys: ArchitectureKeys, spec: ModelSpec, window: int, local: RopeSpec, *, period: int
) -> ModelSpec:
    """Makes layers slide, turning with `local`: those that the file flags, else by a period.

    The last layer of each period sees everything; with a period of 0 all layers slide.

    Source: llama.cpp's load_swa_pattern and set_swa_pattern.
    """
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.require(key, spec.layers[0].block.mixer.head_dim)
    keys.require("rope.dimension_count_swa", local.dims)
    ropes = spec.ropes if local == spec.ropes[0] else (spec.ropes[0], local)
    slides = keys.flags("attention.sliding_window_pattern", spec.num_layers)
    if slides is None:
        period = keys.uint("attention.sliding_window_pattern", period, least=0)
        slides = tuple(not period or (i + 1) % period > 0 for i in range(spec.num_layers))
    layers = tuple(
        replace(layer, window=window, rope_id=len(ropes) - 1) if slide else layer
        for layer, slide in zip(spec.layers, slides, strict=True)
    )
    return replace(spec, layers=layers, ropes=ropes)


def _with_long_factors(keys: ArchitectureKeys, spec: ModelSpec) -> ModelSpec:
    """Adds the frequency factors of a short and a long context, either of which may be missing."""
    short, long = (
        name if keys.has_tensor(name) else ""
        for name in ("rope_factors_short.weight", "rope_factors_long.weight")
    )
    original = keys.uint("rope.scaling.original_context_length", spec.context_train)
    rope = replace(spec.ropes[0], factors=short, long_factors=long, short_context=original)
    return replace(spec, ropes=(rope,))


def _refuse_partial_rope(keys: ArchitectureKeys, spec: ModelSpec) -> None:
    """Refuses what llama.cpp's graph of the architecture refuses: heads turned in part."""
    dims, head_dim = spec.ropes[0].dims, spec.layers[0].block.mixer.head_dim
    if dims != head_dim:
        raise keys.error("rope.dimension_count", dims, f"the head's {head_dim}")


def _decoder(keys: ArchitectureKeys, block: BlockSpec, pairing: RopePairing) -> ModelSpec:
    return ModelSpec(
        architecture=keys.architecture,
        vocab_size=keys.vocab_size(),
        width=keys.uint("embedding_length"),
        context_train=keys.uint("context_length"),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        layers=(LayerSpec(block),) * keys.uint("block_count", most=_MAX_LAYERS),
        ropes=(_rope(keys, pairing, block.mixer.head_dim),),
        tied_head=not keys.has_tensor("output.weight"),
        has_head_bias=keys.has_tensor("output.bias"),
    )


def _block(
    keys: ArchitectureKeys,
    *,
    activation: Activation = Activation.SILU,
    qk_norm: QkNorm = QkNorm.NONE,
    is_ffn_fused: bool = False,
) -> BlockSpec:
    inputs = ("ffn_up",) if is_ffn_fused else ("ffn_gate", "ffn_up")
    ffn = DenseFfnSpec(
        hidden=keys.uint("feed_forward_length"),
        activation=activation,
        biases=keys.biases(*inputs, "ffn_down"),
        is_fused=is_ffn_fused,
    )
    return BlockSpec(_attention(keys, qk_norm), ffn)


def _attention(keys: ArchitectureKeys, qk_norm: QkNorm) -> AttentionSpec:
    width, num_heads = keys.uint("embedding_length"), keys.uint("attention.head_count")
    num_kv_heads = keys.uint("attention.head_count_kv", num_heads)
    head_dim = keys.uint("attention.key_length", width // num_heads)
    keys.require("attention.value_length", head_dim)
    keys.require("attention.clamp_kqv", 0.0)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads}")
    is_fused = keys.has_tensor("blk.0.attn_qkv.weight")
    inputs = ("attn_qkv",) if is_fused else ("attn_q", "attn_k", "attn_v")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        biases=keys.biases(*inputs, "attn_output"),
        qk_norm=qk_norm,
        is_fused=is_fused,
    )


def _rope(keys: ArchitectureKeys, pairing: RopePairing, head_dim: int) -> RopeSpec:
    # A factor without a type is linear; `rope.scale_linear` is its name in old files.
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "longrope"):
        raise keys.error("rope.scaling.type", scaling, "none, linear or longrope")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0))
    if factor < 0:
        raise keys.error("rope.scaling.factor", factor, "0 or more")
    dims = keys.uint("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise keys.error("rope.dimension_count", dims, f"an even number up to {head_dim}")
    keys.ignore("rope.scaling.finetuned")
    keys.require("rope.scaling.alpha", 0.0)
    # Only long factors know an original context: without them it means nothing.
    keys.ignore("rope.scaling.original_context_length")
    return RopeSpec(
        pairing=pairing,
        dims=dims,
        base=keys.positive("rope.freq_base", 10000.0),
        position_scale=1.0 if scaling == "none" or not factor else 1.0 / factor,
        magnitude=keys.real("rope.scaling.attn_factor", 1.0),
    )


_BUILDERS: dict[str, Callable[[ArchitectureKeys], ModelSpec]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
