"""Builders of the recurrent and hybrid architectures, as those in `engine.model.architectures`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.model.metadata import ArchitectureKeys
from engine.model.readers import (
    read_attention,
    read_dense_ffn,
    read_model,
    read_moe_ffn,
    read_num_layers,
    read_rope,
)
from engine.model.recurrent_spec import DeltaNetSpec, ShortConvSpec, SsmSpec
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    Ffn,
    ModelSpec,
    QkNorm,
    RopePairing,
    RopeSpec,
)

_MAX_KERNEL = 64  # taps; every step keeps and multiplies all of them


def mamba2(keys: ArchitectureKeys) -> ModelSpec:
    """Mamba 2: nothing but state-space mixers."""
    keys.ignore("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    block = BlockSpec(None, None, recurrent=_ssm(keys, 0))
    return read_model(keys, (block,) * read_num_layers(keys), None)


def falcon_h1(keys: ArchitectureKeys) -> ModelSpec:
    """Falcon H1: attention and Mamba 2 side by side in every layer."""
    mixer = _scaled(keys, read_attention(keys))
    has_suffix = keys.has_tensor("blk.0.ffn_norm.weight")
    block = BlockSpec(
        mixer,
        read_dense_ffn(keys),
        recurrent=_ssm(keys, 0),
        ffn_norm="ffn_norm.weight" if has_suffix else "ffn_norm",
    )
    rope = read_rope(keys, RopePairing.NEOX, mixer.head_dim)
    return read_model(keys, (block,) * read_num_layers(keys), rope)


def granitehybrid(keys: ArchitectureKeys) -> ModelSpec:
    """Granite 4: Mamba 2 with a layer of attention here and there, which need not have rope."""
    attends = _attention_layers(keys)
    block = BlockSpec(
        None, _granite_ffn(keys), residual_scale=keys.real("residual_scale", 0.0) or 1.0
    )
    blocks: dict[bool, BlockSpec] = {}
    rope: RopeSpec | None = None
    if True in attends:
        mixer = _scaled(keys, read_attention(keys, layer=attends.index(True)))
        rope = read_rope(keys, RopePairing.NORM, mixer.head_dim)
        # Granite's files use this key as a switch.
        mixer = replace(mixer, has_rope=keys.flag("rope.scaling.finetuned", True))
        blocks[True] = replace(block, mixer=mixer)
    if False in attends:
        blocks[False] = replace(block, recurrent=_ssm(keys, attends.index(False)))
    spec = read_model(keys, [blocks[attend] for attend in attends], rope)
    return replace(
        spec,
        embedding_scale=keys.real("embedding_scale", 0.0) or 1.0,
        logit_scale=1.0 / (keys.real("logit_scale", 0.0) or 1.0),
    )


def _granite_ffn(keys: ArchitectureKeys) -> Ffn:
    if not keys.uint("expert_count", 0, least=0):
        keys.require("expert_used_count", 0)
        return read_dense_ffn(keys)
    experts = read_moe_ffn(keys, keys.uint("feed_forward_length"), normalises=True)
    hidden = keys.uint("expert_shared_feed_forward_length", 0, least=0)
    return replace(experts, shared=DenseFfnSpec(hidden, Activation.SILU) if hidden else None)


def lfm2(keys: ArchitectureKeys) -> ModelSpec:
    """LFM 2: gated short convolutions, attention where there are K/V heads."""
    keys.require("attention.sliding_window", 0)
    attends = _attention_layers(keys)
    ffn = read_dense_ffn(keys)
    conv = ShortConvSpec(
        width=keys.uint("embedding_length"),
        kernel=keys.uint("shortconv.l_cache", least=2, most=_MAX_KERNEL),
    )
    blocks = {False: BlockSpec(None, ffn, recurrent=conv)}
    rope: RopeSpec | None = None
    if True in attends:
        mixer = read_attention(keys, QkNorm.HEAD, layer=attends.index(True))
        rope = read_rope(keys, RopePairing.NEOX, mixer.head_dim)
        blocks[True] = BlockSpec(mixer, ffn)
    spec = read_model(keys, [blocks[attend] for attend in attends], rope)
    return replace(spec, output_norm="token_embd_norm.weight")


def qwen35(keys: ArchitectureKeys) -> ModelSpec:
    """Dense Qwen 3.5: gated delta nets, every few layers gated attention that turns in part."""
    # Sections give image and text positions their pairs; of text all positions are one.
    keys.ignore("rope.dimension_sections")
    return _delta_hybrid(keys, read_dense_ffn(keys), _delta_net(keys))


def qwen3next(keys: ArchitectureKeys) -> ModelSpec:
    """Qwen 3 Next: as Qwen 3.5, with experts and a gated shared one."""
    keys.ignore("feed_forward_length")
    experts = read_moe_ffn(keys, keys.uint("expert_feed_forward_length"), normalises=True)
    shared = DenseFfnSpec(keys.uint("expert_shared_feed_forward_length"), Activation.SILU)
    ffn = replace(experts, shared=shared, has_shared_gate=True)
    net = replace(_delta_net(keys), is_interleaved=True, is_fused=True)
    return _delta_hybrid(keys, ffn, net)


def _delta_hybrid(keys: ArchitectureKeys, ffn: Ffn, net: DeltaNetSpec) -> ModelSpec:
    num_unused, total = keys.uint("nextn_predict_layers", 0, least=0), read_num_layers(keys)
    if num_unused >= total:
        raise keys.error("nextn_predict_layers", num_unused, f"less than the {total} blocks")
    recurs = keys.flags("attention.recurrent_layers", total)
    interval = keys.uint("full_attention_interval", 4)
    if recurs is None:
        recurs = tuple((layer + 1) % interval > 0 for layer in range(total))
    recurs = recurs[: total - num_unused]
    norm = "post_attention_norm.weight"
    blocks = {True: BlockSpec(None, ffn, recurrent=net, ffn_norm=norm)}
    rope: RopeSpec | None = None
    if False in recurs:
        mixer = read_attention(keys, QkNorm.HEAD, layer=recurs.index(False))
        mixer = replace(_scaled(keys, mixer), has_gate=True)
        rope = read_rope(keys, RopePairing.NEOX, mixer.head_dim)
        blocks[False] = BlockSpec(mixer, ffn, ffn_norm=norm)
    spec = read_model(keys, [blocks[recur] for recur in recurs], rope)
    return replace(spec, num_unused_layers=num_unused)


def _ssm(keys: ArchitectureKeys, layer: int) -> SsmSpec:
    """A Mamba 2 mixer; `layer` is the first that has one."""
    inner, num_heads = keys.uint("ssm.inner_size"), keys.uint("ssm.time_step_rank")
    num_groups = keys.uint("ssm.group_count")
    _check_divides(keys, "ssm.time_step_rank", num_heads, inner)
    _check_divides(keys, "ssm.group_count", num_groups, num_heads)
    return SsmSpec(
        num_heads=num_heads,
        head_dim=inner // num_heads,
        num_groups=num_groups,
        state_dim=keys.uint("ssm.state_size"),
        kernel=keys.uint("ssm.conv_kernel", least=2, most=_MAX_KERNEL),
        has_conv_bias=keys.has_tensor(f"blk.{layer}.ssm_conv1d.bias"),
        has_norm=keys.has_tensor(f"blk.{layer}.ssm_norm.weight"),
    )


def _delta_net(keys: ArchitectureKeys) -> DeltaNetSpec:
    num_key_heads, num_value_heads = keys.uint("ssm.group_count"), keys.uint("ssm.time_step_rank")
    head_dim = keys.uint("ssm.state_size")
    _check_divides(keys, "ssm.group_count", num_key_heads, num_value_heads)
    keys.require("ssm.inner_size", num_value_heads * head_dim)
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        head_dim=head_dim,
        kernel=keys.uint("ssm.conv_kernel", least=2, most=_MAX_KERNEL),
    )


def _check_divides(keys: ArchitectureKeys, suffix: str, value: int, whole: int) -> None:
    if whole % value:
        raise keys.error(suffix, value, f"a divisor of {whole}")


def _scaled(keys: ArchitectureKeys, mixer: AttentionSpec) -> AttentionSpec:
    """Attention whose scores the file may scale otherwise; 0 is the usual way."""
    return replace(mixer, scale=keys.real("attention.scale", 0.0) or mixer.scale)


def _attention_layers(keys: ArchitectureKeys) -> Sequence[bool]:
    """Which layers attend: those with K/V heads, all where the file has one number for all."""
    count = read_num_layers(keys)
    flags = keys.flags("attention.head_count_kv", count)
    return (True,) * count if flags is None else flags
