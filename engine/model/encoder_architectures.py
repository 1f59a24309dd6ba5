"""Builders of the families that read whole texts; see `engine.model.architectures`.

Source of every default: the `load_arch_hparams` and the graph of llama.cpp's model of the name.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import ModelFileError
from engine.model.encoder_spec import EncoderSpec, ScoredState
from engine.model.metadata import ArchitectureKeys
from engine.model.readers import (
    read_attention,
    read_dense_ffn,
    read_model,
    read_num_layers,
    read_rope,
    read_scoring,
)
from engine.model.spec import (
    Activation,
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    ModelSpec,
    RopePairing,
    RopeSpec,
)

_TYPE_COUNT = "tokenizer.ggml.token_type_count"
_MAX_TOKEN_TYPES = 65536


def bert(keys: ArchitectureKeys) -> ModelSpec:
    """BERT and its many tunes (BGE, MiniLM, cross-encoders): learned positions, plain GELU."""
    mixer = replace(read_attention(keys), has_rope=False)
    ffn = read_dense_ffn(keys, Activation.GELU, is_gated=False)
    spec = _encoder(keys, mixer, ffn, None, has_positions=True)
    return replace(spec, scoring=read_scoring(keys, ScoredState.FIRST))


def nomic_bert(keys: ArchitectureKeys) -> ModelSpec:
    """Nomic's embedding models: rope and a gated feed-forward."""
    mixer = read_attention(keys)
    rope = read_rope(keys, RopePairing.NEOX, mixer.head_dim)
    return _encoder(keys, mixer, read_dense_ffn(keys), rope)


def _encoder(
    keys: ArchitectureKeys,
    mixer: AttentionSpec,
    ffn: DenseFfnSpec,
    rope: RopeSpec | None,
    *,
    has_positions: bool = False,
) -> ModelSpec:
    if keys.flag("attention.causal", True):
        raise keys.error("attention.causal", True, "false")
    block = BlockSpec(mixer, ffn, has_pre_norms=False, has_sum_norms=True)
    epsilon = "attention.layer_norm_epsilon"
    spec = read_model(keys, (block,) * read_num_layers(keys), rope, epsilon=epsilon)
    num_types = keys.file.metadata.get_uint(_TYPE_COUNT, 0, maximum=_MAX_TOKEN_TYPES)
    if not num_types:
        raise ModelFileError(keys.file.name, f"{_TYPE_COUNT} is missing or 0")
    has_types = keys.has_tensor("token_types.weight")
    return replace(
        spec,
        tied_head=True,
        has_head_bias=False,
        encoder=EncoderSpec(num_types if has_types else 0, has_positions),
    )
