"""From a file's metadata to a `ModelSpec`: one builder per architecture, in one table.

A key that llama.cpp understands, that changes the maths and that no builder here reads refuses the
file by name: a model is run as it was meant to be run or not at all. Keys that llama.cpp does not
know are ignored, as it ignores them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import UnsupportedModel
from engine.gguf.reader import GgufFile
from engine.model.metadata import ArchitectureKeys
from engine.model.spec import (
    Activation,
    AttentionSpec,
    DenseFfnSpec,
    LayerSpec,
    ModelSpec,
    RopePairing,
    RopeSpec,
)


def read_spec(file: GgufFile) -> ModelSpec:
    """Reads what the model computes.

    Raises:
        UnsupportedModel: The architecture, or a key that changes its maths, is not implemented.
        ModelFileError: A key is missing or has the wrong type.
    """
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
    attention = _attention(keys, RopePairing.NORM)
    ffn = DenseFfnSpec(
        hidden=keys.uint("feed_forward_length"),
        activation=Activation.SILU,
        biases=keys.biases("ffn_gate", "ffn_up", "ffn_down"),
    )
    return _decoder(keys, LayerSpec(attention, ffn))


def _decoder(keys: ArchitectureKeys, layer: LayerSpec) -> ModelSpec:
    return ModelSpec(
        architecture=keys.architecture,
        vocab_size=keys.vocab_size(),
        width=keys.uint("embedding_length"),
        context_train=keys.uint("context_length"),
        norm_eps=keys.real("attention.layer_norm_rms_epsilon"),
        layers=(layer,) * keys.uint("block_count"),
        tied_head="output.weight" not in keys.file.tensors,
    )


def _attention(keys: ArchitectureKeys, pairing: RopePairing) -> AttentionSpec:
    width, num_heads = keys.uint("embedding_length"), keys.uint("attention.head_count")
    num_kv_heads = keys.uint("attention.head_count_kv", num_heads)
    head_dim = keys.uint("attention.key_length", width // num_heads)
    keys.require("attention.value_length", head_dim)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", num_kv_heads, f"a divisor of {num_heads}")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(keys, pairing, head_dim),
        biases=keys.biases("attn_q", "attn_k", "attn_v", "attn_output"),
    )


def _rope(keys: ArchitectureKeys, pairing: RopePairing, head_dim: int) -> RopeSpec:
    scaling = keys.text("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise keys.error("rope.scaling.type", scaling, "none or linear")
    # The scale of files older than `rope.scaling.*`.
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    dims = keys.uint("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise keys.error("rope.dimension_count", dims, f"an even number up to {head_dim}")
    keys.ignore("rope.scaling.original_context_length", "rope.scaling.finetuned")
    keys.require("rope.scaling.attn_factor", 1.0)
    return RopeSpec(
        pairing=pairing,
        dims=dims,
        base=keys.real("rope.freq_base", 10000.0),
        position_scale=1.0 / factor if scaling == "linear" and factor > 0 else 1.0,
        has_factors="rope_freqs.weight" in keys.file.tensors,
    )


_BUILDERS: dict[str, Callable[[ArchitectureKeys], ModelSpec]] = {
    "llama": _llama,
}
