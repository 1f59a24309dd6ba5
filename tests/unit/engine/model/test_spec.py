from __future__ import annotations

from dataclasses import replace

from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    LayerSpec,
    ModelSpec,
    RopePairing,
    RopeSpec,
)

MIXER = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
BLOCK = BlockSpec(MIXER, DenseFfnSpec(hidden=64, activation=Activation.SILU))
OTHER = replace(BLOCK, has_post_norms=True)
ROPE = RopeSpec(RopePairing.NORM, dims=8, base=10000.0)


def model(*layers: LayerSpec, ropes: tuple[RopeSpec, ...] = (ROPE,)) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        vocab_size=10,
        width=32,
        context_train=128,
        norm_eps=1e-5,
        layers=layers,
        ropes=ropes,
        tied_head=False,
    )


def test_equal_neighbours_are_one_run() -> None:
    blocks = [BLOCK, BLOCK, OTHER, BLOCK]
    assert model(*map(LayerSpec, blocks)).runs() == ((BLOCK, (0, 1)), (OTHER, (2,)), (BLOCK, (3,)))


def test_layers_that_differ_in_window_or_rope_share_a_run() -> None:
    layers = [LayerSpec(BLOCK), LayerSpec(BLOCK, window=16, rope_id=1), LayerSpec(BLOCK, window=8)]
    spec = model(*layers)
    assert spec.runs() == ((BLOCK, (0, 1, 2)),)
    assert (spec.num_layers, spec.num_window_layers, spec.window) == (3, 2, 16)


def test_a_model_without_windows_has_none() -> None:
    spec = model(LayerSpec(BLOCK))
    assert (spec.num_window_layers, spec.window) == (0, None)


def test_long_factors_take_over_past_the_short_context() -> None:
    rope = replace(ROPE, factors="short", long_factors="long", short_context=64)
    spec = model(LayerSpec(BLOCK), ropes=(rope, ROPE))
    assert spec.at_context(64).ropes == (rope, ROPE)
    assert spec.at_context(65).ropes == (replace(rope, factors="long"), ROPE)
