"""The parts of a `ModelSpec` as the keys of most architectures give them.

Builders in `engine.model.architectures` put them together and change what their family has
otherwise. Source of every default: llama.cpp's `load_hparams`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.errors import UnsupportedModel
from engine.model.encoder_spec import ScoredState, ScoringSpec
from engine.model.metadata import ArchitectureKeys
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    Gating,
    LayerSpec,
    ModelSpec,
    MoeFfnSpec,
    QkNorm,
    RopePairing,
    RopeSpec,
    RouterSpec,
)

_MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS; a damaged count must not become a tuple
_MAX_EXPERTS = 1024
_MAX_SCORES = 65536
_UNPOOLED, _MEAN_POOLED = 0, 1  # llama.cpp's numbers of poolings
_MAX_WINDOW = 2**30  # positions and ages are int32 on the device
# Turns over the original context past which a pair keeps its frequency, and below which it is
# scaled: llama.cpp's yarn_beta_fast and yarn_beta_slow, which few architectures read from a file.
_YARN_TURNS = (32.0, 1.0)


def read_num_layers(keys: ArchitectureKeys) -> int:
    """The number of blocks."""
    return keys.uint("block_count", most=_MAX_LAYERS)


def read_model(
    keys: ArchitectureKeys,
    blocks: Sequence[BlockSpec],
    rope: RopeSpec | None,
    *,
    epsilon: str = "attention.layer_norm_rms_epsilon",
) -> ModelSpec:
    """A model whose layers all see everything and turn with one rope, if any.

    `epsilon` is the key of the norms'.
    """
    return ModelSpec(
        architecture=keys.architecture,
        vocab_size=keys.vocab_size(),
        width=keys.uint("embedding_length"),
        context_train=keys.uint("context_length"),
        norm_eps=keys.real(epsilon),
        layers=tuple(LayerSpec(block) for block in blocks),
        ropes=(rope,) if rope else (),
        tied_head=not keys.has_tensor("output.weight"),
        has_head_bias=keys.has_tensor("output.bias"),
    )


def read_uniform_model(keys: ArchitectureKeys, block: BlockSpec, pairing: RopePairing) -> ModelSpec:
    """A model of equal blocks with grouped-query attention."""
    assert isinstance(block.mixer, AttentionSpec)
    rope = read_rope(keys, pairing, block.mixer.head_dim)
    return read_model(keys, (block,) * read_num_layers(keys), rope)


def read_attention(
    keys: ArchitectureKeys, qk_norm: QkNorm = QkNorm.NONE, *, layer: int = 0
) -> AttentionSpec:
    """Grouped-query attention; biases and a fused matrix where `layer`, the first, has them."""
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


def read_dense_ffn(
    keys: ArchitectureKeys,
    activation: Activation = Activation.SILU,
    *,
    is_fused: bool = False,
    is_gated: bool = True,
) -> DenseFfnSpec:
    """The dense feed-forward; biases where the first layer has them."""
    ffn = DenseFfnSpec(
        hidden=keys.uint("feed_forward_length"),
        activation=activation,
        is_fused=is_fused,
        is_gated=is_gated,
    )
    return replace(ffn, biases=keys.biases(*ffn.inputs, "ffn_down"))


def read_moe_ffn(
    keys: ArchitectureKeys,
    hidden: int,
    *,
    gating: Gating = Gating.SOFTMAX,
    normalises: bool = False,
    activation: Activation = Activation.SILU,
) -> MoeFfnSpec:
    """Experts of `hidden` components each; stacks with biases where the first layer has them."""
    count = keys.uint("expert_count", most=_MAX_EXPERTS)
    groups = keys.uint("expert_group_count", 0, least=0, most=count) or 1
    groups_used = keys.uint("expert_group_used_count", groups, least=0, most=groups) or groups
    if groups > 1 and (count % groups or count // groups < 2):
        raise keys.error("expert_group_count", groups, f"a divisor of up to half of {count}")
    router = RouterSpec(
        num_experts=count,
        num_used=keys.uint("expert_used_count", most=count),
        gating=gating,
        normalises=normalises,
        num_groups=groups,
        num_groups_used=groups_used,
        has_bias=keys.has_tensor("blk.0.ffn_gate_inp.bias"),
    )
    ffn = MoeFfnSpec(router, hidden, activation)
    return replace(ffn, biases=keys.biases(*ffn.inputs, "ffn_down_exps"))


def read_rope(
    keys: ArchitectureKeys, pairing: RopePairing, head_dim: int, base: float | None = None
) -> RopeSpec:
    """Rope of the first components of a head, as its keys scale it; `base` replaces the file's."""
    # A factor without a type is linear; `rope.scale_linear` is its name in old files.
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "longrope", "yarn"):
        raise keys.error("rope.scaling.type", scaling, "none, linear, longrope or yarn")
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0.0))
    if factor < 0:
        raise keys.error("rope.scaling.factor", factor, "0 or more")
    dims = keys.uint("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise keys.error("rope.dimension_count", dims, f"an even number up to {head_dim}")
    keys.ignore("rope.scaling.finetuned")
    keys.require("rope.scaling.alpha", 0.0)
    # Only YaRN and long factors know an original context: without them it means nothing.
    keys.ignore("rope.scaling.original_context_length")
    rope = RopeSpec(
        pairing=pairing,
        dims=dims,
        base=base or keys.positive("rope.freq_base", 10000.0),
        position_scale=1.0 if scaling == "none" or not factor else 1.0 / factor,
        magnitude=keys.real("rope.scaling.attn_factor", 1.0),
    )
    return _with_yarn(keys, rope) if scaling == "yarn" else rope


def _with_yarn(keys: ArchitectureKeys, rope: RopeSpec) -> RopeSpec:
    """Scales a rope by YaRN: fast pairs keep their frequency, and all grow with the context.

    Source: Peng et al. 2023; llama.cpp's rope_yarn and ggml_rope_yarn_corr_dims.
    """
    keys.ignore(*(f"rope.scaling.yarn_{name}" for name in _YARN_IGNORED))
    if rope.base <= 1.0:
        raise keys.error("rope.freq_base", rope.base, "more than 1 with YaRN")
    original = keys.uint("rope.scaling.original_context_length", keys.uint("context_length"))
    fast, slow = (_pair_that_turns(rope, original, turns) for turns in _YARN_TURNS)
    ramp = max(0.0, math.floor(fast)), min(rope.dims - 1.0, math.ceil(slow))
    growth = 1.0 + 0.1 * max(0.0, -math.log(rope.position_scale))
    return replace(rope, yarn_ramp=ramp, magnitude=rope.magnitude * growth)


# Written by converters, and left alone by llama.cpp's architectures that are supported here.
_YARN_IGNORED = ("ext_factor", "attn_factor", "beta_fast", "beta_slow")


def _pair_that_turns(rope: RopeSpec, context: int, turns: float) -> float:
    """The number, not whole, of the pair that turns this often over a context; in f32 as ggml's."""
    one = np.float32
    share = np.log(one(context) / (one(turns) * one(2.0) * one(math.pi)))
    return float(one(rope.dims) * share / (one(2.0) * np.log(one(rope.base))))


def refuse_partial_rope(keys: ArchitectureKeys, spec: ModelSpec) -> None:
    """Refuses what llama.cpp's graph of the architecture refuses: heads turned in part."""
    dims, head_dim = spec.ropes[0].dims, spec.kv.key_dim
    if dims != head_dim:
        raise keys.error("rope.dimension_count", dims, f"the head's {head_dim}")


def read_scoring(keys: ArchitectureKeys, state: ScoredState) -> ScoringSpec | None:
    """The head that scores a text; None where the file has none.

    `state` is what it scores unless the file says that it is the mean.
    """
    tensors = keys.file.tensors
    keys.ignore("classifier.output_labels")  # names for people; the matrix says how many there are
    pooling = keys.uint("classifier.pooling_type", _UNPOOLED, least=0)
    has_dense, output = keys.has_tensor("cls.weight"), tensors.get("cls.output.weight")
    if not has_dense and output is None:
        return None
    if output is not None and (len(output.shape) != 2 or output.shape[0] > _MAX_SCORES):
        shape = tuple(output.shape)
        raise UnsupportedModel(keys.file.name, f"tensor cls.output.weight has shape {shape}")
    return ScoringSpec(
        state=ScoredState.MEAN if pooling == _MEAN_POOLED else state,
        has_dense=has_dense,
        num_outputs=0 if output is None else output.shape[0],
        biases=frozenset(name for name in ("cls", "cls.output") if f"{name}.bias" in tensors),
    )


def read_window(keys: ArchitectureKeys, default: int | None, *, least: int = 0) -> int:
    """The sliding window in tokens; a `default` of None makes it required."""
    return keys.uint("attention.sliding_window", default, least=least, most=_MAX_WINDOW)


def windowed(
    keys: ArchitectureKeys, spec: ModelSpec, window: int, local: RopeSpec, *, period: int
) -> ModelSpec:
    """Makes layers slide, turning with `local`: those that the file flags, else by a period.

    The last layer of each period sees everything; with a period of 0 all layers slide.

    Source: llama.cpp's load_swa_pattern and set_swa_pattern.
    """
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        keys.require(key, spec.kv.key_dim)
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


def with_long_factors(keys: ArchitectureKeys, spec: ModelSpec) -> ModelSpec:
    """Adds the frequency factors of a short and a long context, either of which may be missing."""
    short, long = (
        name if keys.has_tensor(name) else ""
        for name in ("rope_factors_short.weight", "rope_factors_long.weight")
    )
    original = keys.uint("rope.scaling.original_context_length", spec.context_train)
    rope = replace(spec.ropes[0], factors=short, long_factors=long, short_context=original)
    return replace(spec, ropes=(rope,))
