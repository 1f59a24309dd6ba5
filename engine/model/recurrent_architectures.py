"""Builders of the recurrent and hybrid architectures, as those in `engine.model.architectures`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.model.building import attention, decoder, dense_ffn, num_layers, rope
from engine.model.metadata import ArchitectureKeys
from engine.model.recurrent_spec import DeltaNetSpec, ShortConvSpec, SsmSpec
from engine.model.spec import (
    AttentionSpec,
    BlockSpec,
    LayerSpec,
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
    return decoder(keys, (LayerSpec(block),) * num_layers(keys), ())


def falcon_h1(keys: ArchitectureKeys) -> ModelSpec:
    """Falcon H1: attention and Mamba 2 side by side in every layer."""
    mixer = _scaled(keys, attention(keys, QkNorm.NONE))
    has_suffix = keys.has_tensor("blk.0.ffn_norm.weight")
    block = BlockSpec(
        mixer,
        dense_ffn(keys),
        recurrent=_ssm(keys, 0),
        ffn_norm="ffn_norm.weight" if has_suffix else "ffn_norm",
    )
    layers = (LayerSpec(block),) * num_layers(keys)
    return decoder(keys, layers, (rope(keys, RopePairing.NEOX, mixer.head_dim),))


def granitehybrid(keys: ArchitectureKeys) -> ModelSpec:
    """Granite 4: Mamba 2 with a layer of attention here and there, which need not have rope."""
    attends = _attention_layers(keys)
    residual_scale = keys.real("residual_scale", 0.0) or 1.0
    ffn = dense_ffn(keys)
    blocks: dict[bool, BlockSpec] = {}
    ropes: tuple[RopeSpec, ...] = ()
    if True in attends:
        mixer = _scaled(keys, attention(keys, QkNorm.NONE, layer=attends.index(True)))
        turning = rope(keys, RopePairing.NORM, mixer.head_dim)
        # Granite's files use this key as a switch.
        has_rope = keys.switch("rope.scaling.finetuned", default=True)
        ropes = (turning,) if has_rope else ()
        mixer = replace(mixer, has_rope=has_rope)
        blocks[True] = BlockSpec(mixer, ffn, residual_scale=residual_scale)
    if False in attends:
        ssm = _ssm(keys, attends.index(False))
        blocks[False] = BlockSpec(None, ffn, recurrent=ssm, residual_scale=residual_scale)
    spec = decoder(keys, tuple(LayerSpec(blocks[attend]) for attend in attends), ropes)
    return replace(
        spec,
        embedding_scale=keys.real("embedding_scale", 0.0) or 1.0,
        logit_scale=1.0 / (keys.real("logit_scale", 0.0) or 1.0),
    )


def lfm2(keys: ArchitectureKeys) -> ModelSpec:
    """LFM 2: gated short convolutions, attention where there are K/V heads."""
    keys.require("attention.sliding_window", 0)
    attends = _attention_layers(keys)
    ffn = dense_ffn(keys)
    conv = ShortConvSpec(
        width=keys.uint("embedding_length"),
        kernel=keys.uint("shortconv.l_cache", least=2, most=_MAX_KERNEL),
    )
    blocks = {False: BlockSpec(None, ffn, recurrent=conv)}
    ropes: tuple[RopeSpec, ...] = ()
    if True in attends:
        mixer = attention(keys, QkNorm.HEAD, layer=attends.index(True))
        ropes = (rope(keys, RopePairing.NEOX, mixer.head_dim),)
        blocks[True] = BlockSpec(mixer, ffn)
    spec = decoder(keys, tuple(LayerSpec(blocks[attend]) for attend in attends), ropes)
    return replace(spec, output_norm="token_embd_norm.weight")


def qwen35(keys: ArchitectureKeys) -> ModelSpec:
    """Dense Qwen 3.5: gated delta nets, every few layers gated attention that turns in part."""
    # Sections give image and text positions their pairs; of text all positions are one.
    keys.ignore("rope.dimension_sections")
    return _delta_hybrid(keys, is_interleaved=False, is_fused=False)


def _delta_hybrid(keys: ArchitectureKeys, *, is_interleaved: bool, is_fused: bool) -> ModelSpec:
    num_unused = keys.uint("nextn_predict_layers", 0, least=0)
    total = num_layers(keys)
    if num_unused >= total:
        raise keys.error("nextn_predict_layers", num_unused, f"less than the {total} blocks")
    recurs = keys.flags("attention.recurrent_layers", total)
    interval = keys.uint("full_attention_interval", 4)
    if recurs is None:
        recurs = tuple((layer + 1) % interval > 0 for layer in range(total))
    recurs = recurs[: total - num_unused]
    ffn = dense_ffn(keys)
    norm = "post_attention_norm.weight"
    net = _delta_net(keys, is_interleaved=is_interleaved, is_fused=is_fused)
    blocks = {True: BlockSpec(None, ffn, recurrent=net, ffn_norm=norm)}
    ropes: tuple[RopeSpec, ...] = ()
    if False in recurs:
        mixer = _scaled(keys, attention(keys, QkNorm.HEAD, layer=recurs.index(False)))
        ropes = (rope(keys, RopePairing.NEOX, mixer.head_dim),)
        blocks[False] = BlockSpec(replace(mixer, has_gate=True), ffn, ffn_norm=norm)
    spec = decoder(keys, tuple(LayerSpec(blocks[recur]) for recur in recurs), ropes)
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


def _delta_net(keys: ArchitectureKeys, *, is_interleaved: bool, is_fused: bool) -> DeltaNetSpec:
    num_key_heads, num_value_heads = keys.uint("ssm.group_count"), keys.uint("ssm.time_step_rank")
    head_dim = keys.uint("ssm.state_size")
    _check_divides(keys, "ssm.group_count", num_key_heads, num_value_heads)
    keys.require("ssm.inner_size", num_value_heads * head_dim)
    return DeltaNetSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        head_dim=head_dim,
        kernel=keys.uint("ssm.conv_kernel", least=2, most=_MAX_KERNEL),
        is_interleaved=is_interleaved,
        is_fused=is_fused,
    )


def _check_divides(keys: ArchitectureKeys, suffix: str, value: int, whole: int) -> None:
    if whole % value:
        raise keys.error(suffix, value, f"a divisor of {whole}")


def _scaled(keys: ArchitectureKeys, mixer: AttentionSpec) -> AttentionSpec:
    """Attention whose scores the file may scale otherwise; 0 is the usual way."""
    return replace(mixer, scale=keys.real("attention.scale", 0.0) or mixer.scale)


def _attention_layers(keys: ArchitectureKeys) -> Sequence[bool]:
    """Which layers attend: those with K/V heads, all where the file has one number for all."""
    count = num_layers(keys)
    flags = keys.flags("attention.head_count_kv", count)
    return (True,) * count if flags is None else flags
