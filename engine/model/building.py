"""What builders of architectures share: attention, feed-forward, rope and the model around them.

Every function reads keys of a file and makes a part of a `ModelSpec`; which parts an architecture
has is decided by its builder.
"""

from __future__ import annotations

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

MAX_LAYERS = 512
"""llama.cpp's LLAMA_MAX_LAYERS; a damaged count must not become a tuple."""


def decoder(
    keys: ArchitectureKeys, layers: tuple[LayerSpec, ...], ropes: tuple[RopeSpec, ...]
) -> ModelSpec:
    """The model around its layers."""
    return ModelSpec(
        architecture=keys.architecture,
        vocab_size=keys.vocab_size(),
        width=keys.uint("embedding_length"),
        context_train=keys.uint("context_length"),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        layers=layers,
        ropes=ropes,
        tied_head=not keys.has_tensor("output.weight"),
        has_head_bias=keys.has_tensor("output.bias"),
    )


def uniform_decoder(keys: ArchitectureKeys, block: BlockSpec, pairing: RopePairing) -> ModelSpec:
    """A model of equal blocks of attention."""
    assert block.mixer is not None
    layers = (LayerSpec(block),) * num_layers(keys)
    return decoder(keys, layers, (rope(keys, pairing, block.mixer.head_dim),))


def num_layers(keys: ArchitectureKeys) -> int:
    """The number of blocks, within bounds."""
    return keys.uint("block_count", most=MAX_LAYERS)


def dense_block(
    keys: ArchitectureKeys,
    *,
    activation: Activation = Activation.SILU,
    qk_norm: QkNorm = QkNorm.NONE,
    is_ffn_fused: bool = False,
) -> BlockSpec:
    """Attention and a dense feed-forward, norms before both."""
    ffn = dense_ffn(keys, activation=activation, is_fused=is_ffn_fused)
    return BlockSpec(attention(keys, qk_norm), ffn)


def dense_ffn(
    keys: ArchitectureKeys, *, activation: Activation = Activation.SILU, is_fused: bool = False
) -> DenseFfnSpec:
    """A gated feed-forward."""
    inputs = ("ffn_up",) if is_fused else ("ffn_gate", "ffn_up")
    return DenseFfnSpec(
        hidden=keys.uint("feed_forward_length"),
        activation=activation,
        biases=keys.biases(*inputs, "ffn_down"),
        is_fused=is_fused,
    )


def attention(keys: ArchitectureKeys, qk_norm: QkNorm, *, layer: int = 0) -> AttentionSpec:
    """The attention of a model whose first layer with attention is `layer`."""
    width, num_heads = keys.uint("embedding_length"), keys.uint("attention.head_count")
    num_kv_heads = keys.layer_uint("attention.head_count_kv", layer, num_heads)
    head_dim = keys.uint("attention.key_length", width // num_heads)
    keys.require("attention.value_length", head_dim)
    keys.require("attention.clamp_kqv", 0.0)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads}")
    is_fused = keys.has_tensor(f"blk.{layer}.attn_qkv.weight")
    inputs = ("attn_qkv",) if is_fused else ("attn_q", "attn_k", "attn_v")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        biases=keys.biases(*inputs, "attn_output", layer=layer),
        qk_norm=qk_norm,
        is_fused=is_fused,
    )


def rope(keys: ArchitectureKeys, pairing: RopePairing, head_dim: int) -> RopeSpec:
    """Rope without factors of a tensor."""
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


def refuse_partial_rope(keys: ArchitectureKeys, spec: ModelSpec) -> None:
    """Refuses what llama.cpp's graph of the architecture refuses: heads turned in part."""
    dims, mixer = spec.ropes[0].dims, spec.attention
    if mixer is not None and dims != mixer.head_dim:
        raise keys.error("rope.dimension_count", dims, f"the head's {mixer.head_dim}")
