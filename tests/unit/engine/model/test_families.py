"""What the keys of each family mean, and which of them refuse the file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineError, ModelFileError, UnsupportedModel
from engine.gguf.reader import GgufFile
from engine.model.architectures import read_spec
from engine.model.spec import (
    Activation,
    AttentionSpec,
    DenseFfnSpec,
    Gating,
    KvHeads,
    LatentAttentionSpec,
    ModelSpec,
    MoeFfnSpec,
    QkNorm,
    RopePairing,
    RouterSpec,
)
from engine.model.tensors import check_tensors
from tests.families import (
    FAMILIES,
    HIDDEN,
    NUM_HEADS,
    SHORT_CONTEXT,
    WIDTH,
    WINDOW,
    TinyExperts,
    TinyLatent,
    TinyModel,
    write_family,
)
from tests.ggufs import write_gguf


def spec_of(folder: Path, model: TinyModel | str, **changes: Any) -> ModelSpec:
    """The spec of a family's file, all tensors checked; `__` in a key's name stands for a dot.

    A change to None takes the key out.
    """
    model = FAMILIES[model] if isinstance(model, str) else model
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return read(write_family(folder / "m.gguf", replace(model, keys={**model.keys, **keys})))


def read(path: Path) -> ModelSpec:
    with GgufFile.open(path) as file:
        spec = read_spec(file)
        check_tensors(spec, file)
        return spec


def attention(spec: ModelSpec, layer: int = 0) -> AttentionSpec:
    mixer = spec.layers[layer].block.mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def dense(spec: ModelSpec) -> DenseFfnSpec:
    ffn = spec.layers[0].block.ffn
    assert isinstance(ffn, DenseFfnSpec)
    return ffn


def experts(spec: ModelSpec, layer: int = -1) -> MoeFfnSpec:
    ffn = spec.layers[layer].block.ffn
    assert isinstance(ffn, MoeFfnSpec)
    return ffn


def slides(spec: ModelSpec) -> list[bool]:
    return [layer.window is not None for layer in spec.layers]


def test_qwen2_has_biases(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "qwen2")
    assert attention(spec).biases == {"attn_q", "attn_k", "attn_v"}
    assert spec.has_head_bias
    assert spec.ropes[0].pairing is RopePairing.NEOX


def test_qwen3_normalises_heads(tmp_path: Path) -> None:
    mixer = attention(spec_of(tmp_path, "qwen3"))
    assert (mixer.qk_norm, mixer.head_dim) == (QkNorm.HEAD, 32)


def test_olmo2_normalises_behind_its_parts_and_slides_where_the_file_says(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "olmo2")
    block = spec.layers[0].block
    assert (block.has_pre_norms, block.has_post_norms) == (False, True)
    assert attention(spec).qk_norm is QkNorm.FULL
    assert slides(spec) == [True, False, True]
    full, local = spec.ropes
    assert (full.position_scale, full.magnitude) == (0.25, pytest.approx(1.1))
    assert local == replace(full, position_scale=1.0, magnitude=1.0)
    assert [layer.rope_id for layer in spec.layers] == [1, 0, 1]


def test_gemma_blocks(tmp_path: Path) -> None:
    for name, cap in (("gemma2", 2.0), ("gemma3", 0.0)):
        spec = spec_of(tmp_path, name)
        block = spec.layers[0].block
        assert dense(spec).activation is Activation.GELU
        assert (block.has_pre_norms, block.has_post_norms) == (True, True)
        assert (attention(spec).soft_cap, spec.embedding_scale) == (cap, WIDTH**0.5)
        assert spec.tied_head


def test_gemma2_caps_and_slides_without_being_told(tmp_path: Path) -> None:
    absent = dict.fromkeys(FAMILIES["gemma2"].keys)
    spec = spec_of(tmp_path, replace(FAMILIES["gemma2"], keys=absent))
    assert attention(spec).soft_cap == 50.0
    assert spec.logit_soft_cap == 30.0
    assert [layer.window for layer in spec.layers] == [4096, None, 4096, None]
    assert spec.layers[0].rope_id == 0, "window layers turn like the others"


def test_gemma2_window_layers_may_have_a_base_of_their_own(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma2", rope__freq_base_swa=500.0)
    assert [rope.base for rope in spec.ropes] == [10000.0, 500.0]


def test_gemma3_window_layers_turn_unscaled_and_faster(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gemma3", rope__scaling__attn_factor=1.5)
    full, local = spec.ropes
    assert (full.base, full.position_scale, full.magnitude) == (1e6, 0.125, 1.5)
    assert (local.base, local.position_scale, local.magnitude) == (1e4, 1.0, 1.5)
    assert [layer.window for layer in spec.layers] == [WINDOW] * 5 + [None, WINDOW]
    assert [layer.rope_id for layer in spec.layers] == [1] * 5 + [0, 1]


@pytest.mark.parametrize("window", [None, 0])
@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_without_a_window_all_layers_see_everything(
    tmp_path: Path, name: str, window: int | None
) -> None:
    spec = spec_of(
        tmp_path,
        name,
        attention__sliding_window=window,
        attention__sliding_window_pattern=None,
    )
    assert (spec.window, len(spec.ropes)) == (None, 1)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (2, [True, False, True, False, True, False, True]),
        (3, [True, True, False, True, True, False, True]),
        (1, [False] * 7),
        (0, [True] * 7),
        ([False, True, True, False, False, True, False], None),
        ([1, 0, 0, 1, 1, 1, 0], [True, False, False, True, True, True, False]),
    ],
    ids=str,
)
def test_a_pattern_is_a_period_or_a_flag_for_each_layer(
    tmp_path: Path, pattern: Any, expected: list[bool] | None
) -> None:
    spec = spec_of(tmp_path, "gemma3", attention__sliding_window_pattern=pattern)
    assert slides(spec) == (pattern if expected is None else expected)


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_widest_gemma_scales_scores_by_its_width(
    tmp_path: Path, name: str, num_layers: int
) -> None:
    for count, share in ((num_layers, WIDTH // NUM_HEADS), (num_layers - 1, 32)):
        model = replace(FAMILIES[name], num_layers=count, head_dim=32)
        assert attention(spec_of(tmp_path, model)).scale == share**-0.5


def test_phi3_is_fused_and_has_factors_for_two_contexts(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "phi3")
    (rope,) = spec.ropes
    assert (attention(spec).is_fused, dense(spec).is_fused, dense(spec).hidden) == (
        True,
        True,
        HIDDEN,
    )
    assert (rope.dims, rope.magnitude) == (12, pytest.approx(1.19))
    assert spec.at_context(SHORT_CONTEXT).ropes[0].factors == "rope_factors_short.weight"
    assert spec.at_context(SHORT_CONTEXT + 1).ropes[0].factors == "rope_factors_long.weight"
    assert spec.window is None


def test_phi3_was_trained_on_the_short_context_where_the_file_has_no_other(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "phi3", rope__scaling__original_context_length=None)
    assert spec.ropes[0].short_context == spec.context_train


def test_a_missing_vector_of_factors_is_no_factors(tmp_path: Path) -> None:
    model = replace(FAMILIES["phi3"], rope_factors=("rope_factors_short",))
    spec = spec_of(tmp_path, model)
    assert spec.at_context(SHORT_CONTEXT + 1).ropes[0].factors == ""


def test_llama_has_long_factors_by_its_scaling_type(tmp_path: Path) -> None:
    model = replace(FAMILIES["llama"], rope_factors=FAMILIES["phi3"].rope_factors)
    spec = spec_of(tmp_path, model, rope__scaling__type="longrope")
    assert spec.ropes[0].long_factors == "rope_factors_long.weight"
    with pytest.raises(UnsupportedModel, match=r"rope_factors_long\.weight is not part of a llama"):
        spec_of(tmp_path, model)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"llama"}))
def test_factors_that_llama_cpp_would_not_use_are_refused(tmp_path: Path, name: str) -> None:
    model = replace(FAMILIES[name], rope_factors=("rope_freqs",))
    with pytest.raises(UnsupportedModel, match=f"rope_freqs.weight is not part of a {name} model"):
        spec_of(tmp_path, model)


def test_fused_biases_are_read(tmp_path: Path) -> None:
    model = replace(FAMILIES["phi3"], biases=("attn_qkv", "ffn_up", "ffn_down"))
    spec = spec_of(tmp_path, model)
    assert attention(spec).biases == {"attn_qkv"}
    assert dense(spec).biases == {"ffn_up", "ffn_down"}


@pytest.mark.parametrize("bias", ["attn_q", "ffn_gate"])
def test_a_bias_of_a_matrix_that_is_not_there_is_refused_by_name(tmp_path: Path, bias: str) -> None:
    extra = {f"blk.0.{bias}.bias": np.zeros(WIDTH, np.float32)}
    path = write_family(tmp_path / "m.gguf", FAMILIES["phi3"], extra)
    with pytest.raises(UnsupportedModel, match=rf"blk\.0\.{bias}\.bias is not part of a phi3"):
        read(path)


def test_mixtral_is_a_llama_with_experts(tmp_path: Path) -> None:
    model = replace(FAMILIES["llama"], experts=TinyExperts(used=2))
    ffn = experts(spec_of(tmp_path, model))
    assert ffn.router == RouterSpec(8, 2, Gating.SOFTMAX, normalises=True)
    assert (ffn.hidden, ffn.activation, ffn.biases) == (32, Activation.SILU, frozenset())


def test_qwen3moe_divides_its_hidden_size_where_experts_have_none(tmp_path: Path) -> None:
    model = replace(FAMILIES["qwen3moe"], experts=TinyExperts(used=3, hidden=32))
    spec = spec_of(tmp_path, model, expert_feed_forward_length=None)
    assert experts(spec).hidden == HIDDEN // 3
    assert experts(spec).router.normalises
    assert attention(spec).qk_norm is QkNorm.HEAD


def test_olmoe_takes_weights_as_they_are(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "olmoe")
    assert experts(spec).router == RouterSpec(8, 3, Gating.SOFTMAX)
    assert attention(spec).qk_norm is QkNorm.FULL


def test_gpt_oss_has_sinks_biases_and_yarn_in_every_layer(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "gpt-oss")
    ffn = experts(spec)
    assert ffn.router == RouterSpec(8, 4, Gating.CHOSEN_SOFTMAX, has_bias=True)
    assert ffn.biases == {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
    assert ffn.activation is Activation.CLAMPED_SWIGLU
    assert attention(spec).has_sinks
    assert spec.layers[0].block.ffn_norm == "post_attention_norm.weight"
    assert slides(spec) == [True, False] * 2
    (rope,) = spec.ropes
    assert (rope.position_scale, rope.magnitude) == (0.25, pytest.approx(1 + 0.1 * np.log(4)))
    # Pair 16 log(256 / 64 pi) / log(150000) = 0.3 turns 32 times, pair 4.98 once.
    assert rope.yarn_ramp == (0.0, 5.0)


def test_deepseek2_keeps_one_vector_per_token(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "deepseek2")
    mixer = spec.layers[0].block.mixer
    assert mixer == LatentAttentionSpec(4, 32, 16, 8, 12, scale=24**-0.5, query_rank=24)
    assert spec.kv == KvHeads(1, 40, 0)
    assert isinstance(spec.layers[0].block.ffn, DenseFfnSpec)
    assert experts(spec).router == RouterSpec(
        8, 3, Gating.SIGMOID, True, 2.5, 4, 2, has_selection_bias=True
    )
    assert experts(spec).shared == DenseFfnSpec(64, Activation.SILU)


def test_an_old_deepseek2_keeps_keys_and_values_of_every_head(tmp_path: Path) -> None:
    model = replace(FAMILIES["deepseek2"], latent=TinyLatent(is_split=False, query_rank=0))
    spec = spec_of(tmp_path, model, expert_gating_func=None)
    assert spec.kv == KvHeads(4, 24, 12)
    assert experts(spec).router.gating is Gating.SOFTMAX


@pytest.mark.parametrize(
    ("changes", "magnitude", "scale"),
    [
        ({}, 1.2, 1.44),
        # The converter writes a tenth of the model's multiplier.
        ({"rope__scaling__yarn_log_multiplier": 0.1}, 1.0, 1.44),
        ({"rope__scaling__yarn_log_multiplier": 0.05}, 1.0, 1.21),
        ({"rope__scaling__type": "linear"}, 1.0, 1.44),
        ({"rope__scaling__factor": 1.0}, 1.0, 1.0),
    ],
)
def test_scores_of_deepseek2_grow_with_the_context(
    tmp_path: Path, changes: dict[str, Any], magnitude: float, scale: float
) -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": float(np.exp(2))}
    spec = spec_of(tmp_path, "deepseek2", **(yarn | changes))
    mixer = spec.layers[0].block.mixer
    assert isinstance(mixer, LatentAttentionSpec)
    assert spec.ropes[0].magnitude == pytest.approx(magnitude)
    assert mixer.scale == pytest.approx(scale * 24**-0.5)


ALL = tuple(FAMILIES)
DENSE = ("qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2")
MOE = ("qwen3moe", "olmoe", "gpt-oss", "deepseek2")
WHOLE_HEADS = ("llama", "qwen2", "qwen3", "olmo2", "qwen3moe", "olmoe", "gpt-oss")
WINDOWED = ("gemma2", "gemma3", "olmo2")

# By key: the families that refuse it, a value, and what is said.
REFUSED: list[tuple[tuple[str, ...], str, Any, type[EngineError], str]] = [
    (
        ALL,
        "rope.scaling.type",
        "dynamic",
        UnsupportedModel,
        "is 'dynamic', only none, linear, longrope or yarn",
    ),
    (ALL, "attention.scale", 0.5, UnsupportedModel, "changes the maths and is not implemented for"),
    (ALL, "attention.causal", 0, UnsupportedModel, "changes the maths"),
    (ALL, "attention.clamp_kqv", 8.0, UnsupportedModel, "is 8.0, only 0.0 is implemented"),
    (ALL, "attention.value_length", 8, UnsupportedModel, "is 8.0, only"),
    (ALL, "attention.temperature_scale", 0.5, UnsupportedModel, "changes the maths"),
    (ALL, "logit_scale", 0.5, UnsupportedModel, "changes the maths"),
    (ALL, "residual_scale", 0.5, UnsupportedModel, "changes the maths"),
    (ALL, "embedding_scale", 2.0, UnsupportedModel, "changes the maths"),
    (DENSE, "expert_count", 8, UnsupportedModel, "changes the maths"),
    (MOE, "expert_count", 1025, ModelFileError, "allowed are 0 to 1024"),
    (MOE, "expert_used_count", 9, ModelFileError, "allowed are 0 to 8"),
    (MOE, "expert_used_count", 0, ModelFileError, "is 0, expected at least 1"),
    (MOE, "expert_group_count", 3, UnsupportedModel, "is 3, only a divisor of up to half of 8"),
    (MOE, "expert_group_count", 8, UnsupportedModel, "is 8, only a divisor of up to half of 8"),
    (MOE[:-1], "expert_gating_func", 2, UnsupportedModel, "changes the maths"),
    (MOE[:-1], "expert_weights_norm", True, UnsupportedModel, "changes the maths"),
    (("deepseek2",), "expert_gating_func", 4, UnsupportedModel, "is 4, only 1, 2 or 3"),
    (("deepseek2",), "expert_shared_count", 0, ModelFileError, "is 0, expected at least 1"),
    (("deepseek2",), "leading_dense_block_count", 4, ModelFileError, "allowed are 0 to 3"),
    (("deepseek2",), "attention.head_count_kv", 2, UnsupportedModel, "is 2.0, only 1"),
    (("deepseek2",), "attention.key_length", 24, UnsupportedModel, "is 24.0, only 40"),
    (("deepseek2",), "attention.value_length_mla", 0, UnsupportedModel, "is 0, only one beside"),
    (("deepseek2",), "rope.dimension_count", 24, UnsupportedModel, "is 24, only less than"),
    (("deepseek2",), "nextn_predict_layers", 1, UnsupportedModel, "is 1.0, only 0"),
    (("gpt-oss",), "rope.freq_base", 1.0, UnsupportedModel, "is 1.0, only more than 1 with YaRN"),
    (ALL[:-1], "nextn_predict_layers", 1, UnsupportedModel, "changes the maths"),
    (ALL, "rope.dimension_sections", [4, 4, 0, 0], UnsupportedModel, "changes the maths"),
    (ALL, "rope.scaling.alpha", 2.0, UnsupportedModel, "is 2.0, only 0.0 is implemented"),
    (ALL, "rope.dimension_count", 64, UnsupportedModel, "is 64, only an even number up to"),
    (WHOLE_HEADS, "rope.dimension_count", 8, UnsupportedModel, "is 8, only the head's"),
    (
        ("llama", "qwen2", "qwen3", "phi3", "gemma3", "olmo2"),
        "attn_logit_softcapping",
        8.0,
        UnsupportedModel,
        "changes the maths",
    ),
    (
        ("llama", "qwen2", "qwen3", "phi3", "olmo2"),
        "final_logit_softcapping",
        8.0,
        UnsupportedModel,
        "changes the maths",
    ),
    (("qwen2", "qwen3"), "attention.sliding_window", 16, UnsupportedModel, "changes the maths"),
    (
        ("llama", "qwen2", "qwen3", "phi3"),
        "attention.sliding_window_pattern",
        2,
        UnsupportedModel,
        "changes the maths",
    ),
    (
        ("llama", "qwen2", "qwen3", "phi3"),
        "rope.freq_base_swa",
        1e4,
        UnsupportedModel,
        "changes the maths",
    ),
    (WINDOWED, "attention.key_length_swa", 8, UnsupportedModel, "is 8.0, only 16 is implemented"),
    (WINDOWED, "attention.value_length_swa", 8, UnsupportedModel, "is 8.0, only 16"),
    (WINDOWED, "rope.dimension_count_swa", 8, UnsupportedModel, "is 8.0, only 16 is implemented"),
    (WINDOWED, "attention.sliding_window", 2**31, ModelFileError, "allowed are 0 to 1073741824"),
    (("gemma2",), "attention.sliding_window", 0, ModelFileError, "is 0, expected at least 1"),
    (
        WINDOWED,
        "attention.sliding_window_pattern",
        [True, False],
        ModelFileError,
        "has 2 elements, expected",
    ),
    (
        WINDOWED,
        "attention.sliding_window_pattern",
        [0.5, 0.5],
        ModelFileError,
        "is an array of float32, expected bools",
    ),
    (
        WINDOWED,
        "attention.sliding_window_pattern",
        ["a", "b"],
        ModelFileError,
        "is an array of 2 string, expected an integer",
    ),
    (("gemma2", "gemma3"), "rope.freq_base_swa", 0.0, ModelFileError, "is 0.0, expected more"),
]


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "message"),
    [(name, *rest) for names, *rest in REFUSED for name in names],
    ids=[f"{name}-{key}={value}" for names, key, value, *_ in REFUSED for name in names],
)
def test_what_a_family_does_not_do_refuses_its_file_by_name(
    tmp_path: Path, name: str, key: str, value: Any, error: type[EngineError], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)) as refusal:
        spec_of(tmp_path, name, **{key: value})
    assert f"{name}.{key}" in str(refusal.value)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_more_heads_than_width_are_refused_where_the_width_is_shared(
    tmp_path: Path, name: str
) -> None:
    model = replace(FAMILIES[name], num_layers=46 if name == "gemma2" else 62)
    with pytest.raises(UnsupportedModel, match="head_count is 128, only up to 64"):
        spec_of(tmp_path, model, attention__head_count=128)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "lora.gguf", {"general.type": "adapter"})
    with GgufFile.open(path) as file, pytest.raises(UnsupportedModel) as refusal:
        read_spec(file)
    assert str(refusal.value) == "lora.gguf: is an adapter, not a model; use --lora"
