"""Which tensors a model's file must hold, by name and shape: pure arithmetic on a `ModelSpec`.

Shapes have the outermost dimension first. Matrices are (rows, cols), and stacks of them, one per
expert or head, (count, rows, cols); both are named without `.weight`, everything else as in the
file.
"""

from __future__ import annotations

from engine.errors import UnsupportedModel
from engine.gguf.reader import GgufFile
from engine.model.recurrent_tensors import recurrent_arrays, recurrent_matrices
from engine.model.spec import (
    AttentionSpec,
    BlockSpec,
    DenseFfnSpec,
    Ffn,
    LatentAttentionSpec,
    Mixer,
    ModelSpec,
    MoeFfnSpec,
    QkNorm,
)

Shape = tuple[int, ...]

SUM_NORMS = ("attn_output_norm", "layer_output_norm")
"""The layer norms of an encoder's block: after its attention and after its feed-forward."""
INPUT_NORM = "token_embd_norm"


def block_matrices(block: BlockSpec, width: int) -> dict[str, Shape]:
    """The matrices of a block and its stacks of matrices."""
    found: dict[str, Shape] = {}
    if block.mixer is not None:
        found |= _mixer_matrices(block.mixer, width)
    if block.recurrent is not None:
        found |= recurrent_matrices(block.recurrent, width)
    return found | (_ffn_matrices(block.ffn, width) if block.ffn is not None else {})


def block_tables(block: BlockSpec, width: int) -> dict[str, Shape]:
    """What is read by rows: the biases of stacks, one row per expert."""
    if not isinstance(block.ffn, MoeFfnSpec):
        return {}
    stacks = _ffn_matrices(block.ffn, width)
    return {f"{name}.bias": stacks[name][:2] for name in block.ffn.biases}


def block_vectors(block: BlockSpec, width: int) -> dict[str, int]:
    """The vectors of a block's attention, feed-forward and norms: file name to length."""
    found = _mixer_vectors(block.mixer, width) if block.mixer is not None else {}
    norms = ["attn_norm.weight"] if block.has_pre_norms else []
    norms += ["post_attention_norm.weight"] if block.has_post_norms else []
    if block.ffn is not None:
        found |= _ffn_vectors(block.ffn, width)
        norms += [block.ffn_norm] if block.has_pre_norms else []
        norms += ["post_ffw_norm.weight"] if block.has_post_norms else []
    if block.has_sum_norms:
        norms += [f"{name}.{part}" for name in SUM_NORMS for part in ("weight", "bias")]
    return found | dict.fromkeys(norms, width)


def block_arrays(block: BlockSpec, width: int) -> dict[str, Shape]:
    """Everything of a block that no product takes, its vectors too: file name to shape."""
    found: dict[str, Shape] = {
        name: (length,) for name, length in block_vectors(block, width).items()
    }
    return found | (recurrent_arrays(block.recurrent) if block.recurrent is not None else {})


def _mixer_matrices(mixer: Mixer, width: int) -> dict[str, Shape]:
    match mixer:
        case AttentionSpec():
            return _attention_matrices(mixer, width)
        case LatentAttentionSpec():
            return _latent_matrices(mixer, width)


def _attention_matrices(mixer: AttentionSpec, width: int) -> dict[str, Shape]:
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    output = {"attn_output": (width, queries)}
    if mixer.is_fused:
        return {"attn_qkv": (queries + 2 * keys, width)} | output
    rows = 2 * queries if mixer.has_gate else queries
    return {"attn_q": (rows, width), "attn_k": (keys, width), "attn_v": (keys, width)} | output


def _latent_matrices(mixer: LatentAttentionSpec, width: int) -> dict[str, Shape]:
    heads, latent = mixer.num_heads, mixer.latent_dim
    queries = heads * mixer.key_dim
    found: dict[str, Shape] = {"attn_kv_a_mqa": (latent + mixer.rope_dim, width)}
    if mixer.query_rank:
        found["attn_q_a"] = (mixer.query_rank, width)
        found["attn_q_b"] = (queries, mixer.query_rank)
    else:
        found["attn_q"] = (queries, width)
    if mixer.is_absorbed:
        found["attn_k_b"] = (heads, latent, mixer.nope_dim)
        found["attn_v_b"] = (heads, mixer.value_dim, latent)
    else:
        found["attn_kv_b"] = (heads * (mixer.nope_dim + mixer.value_dim), latent)
    return found | {"attn_output": (width, heads * mixer.value_dim)}


def _ffn_matrices(ffn: Ffn, width: int) -> dict[str, Shape]:
    match ffn:
        case DenseFfnSpec():
            return _dense_matrices(ffn, width)
        case MoeFfnSpec():
            return _moe_matrices(ffn, width)


def _dense_matrices(ffn: DenseFfnSpec, width: int, suffix: str = "") -> dict[str, Shape]:
    down = {f"ffn_down{suffix}": (width, ffn.hidden)}
    rows = 2 * ffn.hidden if ffn.is_fused else ffn.hidden
    return {f"{name}{suffix}": (rows, width) for name in ffn.inputs} | down


def _moe_matrices(ffn: MoeFfnSpec, width: int) -> dict[str, Shape]:
    count = ffn.router.num_experts
    rows = (2 if ffn.is_fused else 1) * ffn.hidden
    found: dict[str, Shape] = {"ffn_gate_inp": (count, width)}
    found |= dict.fromkeys(ffn.inputs, (count, rows, width))
    found["ffn_down_exps"] = (count, width, ffn.hidden)
    if ffn.shared:
        found |= _dense_matrices(ffn.shared, width, "_shexp")
    return found


def _mixer_vectors(mixer: Mixer, width: int) -> dict[str, int]:
    match mixer:
        case AttentionSpec():
            return _attention_vectors(mixer, width)
        case LatentAttentionSpec():
            found = {"attn_kv_a_norm.weight": mixer.latent_dim}
            if mixer.query_rank:
                found["attn_q_a_norm.weight"] = mixer.query_rank
            return found


def _attention_vectors(mixer: AttentionSpec, width: int) -> dict[str, int]:
    rows = _attention_matrices(mixer, width)
    found = {f"{name}.bias": rows[name][0] for name in mixer.biases}
    if mixer.qk_norm is not QkNorm.NONE:
        per_head = mixer.qk_norm is QkNorm.HEAD
        found["attn_q_norm.weight"] = mixer.head_dim * (1 if per_head else mixer.num_heads)
        found["attn_k_norm.weight"] = mixer.head_dim * (1 if per_head else mixer.num_kv_heads)
    if mixer.has_sinks:
        found["attn_sinks.weight"] = mixer.num_heads
    return found


def _ffn_vectors(ffn: Ffn, width: int) -> dict[str, int]:
    match ffn:
        case DenseFfnSpec():
            rows = _dense_matrices(ffn, width)
            return {f"{name}.bias": rows[name][0] for name in ffn.biases}
        case MoeFfnSpec(router=router):
            found: dict[str, int] = {}
            if router.has_bias:
                found["ffn_gate_inp.bias"] = router.num_experts
            if router.has_selection_bias:
                found["exp_probs_b.bias"] = router.num_experts
            if ffn.has_shared_gate:
                found["ffn_gate_inp_shexp.weight"] = width
            return found


def global_matrices(spec: ModelSpec) -> dict[str, Shape]:
    """The matrices outside the layers."""
    names = ["token_embd"] if spec.tied_head else ["token_embd", "output"]
    found: dict[str, Shape] = dict.fromkeys(names, (spec.vocab_size, spec.width))
    if spec.encoder and spec.encoder.num_token_types:
        found["token_types"] = (spec.encoder.num_token_types, spec.width)
    if spec.encoder and spec.encoder.has_positions:
        found["position_embd"] = (spec.context_train, spec.width)
    return found


def global_vectors(spec: ModelSpec) -> dict[str, int]:
    """The vectors outside the layers: file name to length."""
    norms = [f"{INPUT_NORM}.weight", f"{INPUT_NORM}.bias"] if spec.encoder else [spec.output_norm]
    found = dict.fromkeys(norms, spec.width)
    if spec.has_head_bias:
        found["output.bias"] = spec.vocab_size
    for rope in spec.ropes:
        for name in filter(None, (rope.factors, rope.long_factors)):
            found[name] = rope.dims // 2
    return found


def scoring_arrays(spec: ModelSpec) -> dict[str, Shape]:
    """What the head that scores a text holds, by its full name."""
    head = spec.scoring
    if head is None:
        return {}
    found: dict[str, Shape] = {}
    if head.has_dense:
        found["cls.weight"] = (spec.width, spec.width)
    if head.num_outputs:
        found["cls.output.weight"] = (head.num_outputs, spec.width)
    return found | {f"{name}.bias": found[f"{name}.weight"][:1] for name in head.biases}


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor that the file must hold, by its full name."""
    shapes: dict[str, Shape] = {}
    for name, shape in global_matrices(spec).items():
        shapes[f"{name}.weight"] = shape
    for name, length in global_vectors(spec).items():
        shapes[name] = (length,)
    shapes |= scoring_arrays(spec)
    for i, layer in enumerate(spec.layers):
        for name, shape in block_matrices(layer.block, spec.width).items():
            shapes[f"blk.{i}.{name}.weight"] = shape
        for name, shape in block_tables(layer.block, spec.width).items():
            shapes[f"blk.{i}.{name}"] = shape
        for name, shape in block_arrays(layer.block, spec.width).items():
            shapes[f"blk.{i}.{name}"] = shape
    return shapes


def array_names(spec: ModelSpec) -> set[str]:
    """The full names of all that no product takes, but for those of `scoring_arrays`."""
    names = set(global_vectors(spec))
    for i, layer in enumerate(spec.layers):
        names |= {f"blk.{i}.{name}" for name in block_arrays(layer.block, spec.width)}
    return names


def check_tensors(spec: ModelSpec, file: GgufFile) -> None:
    """Checks that the file holds exactly what the spec reads.

    Raises:
        UnsupportedModel: A tensor is missing, has another shape, or would be ignored.
    """
    expected = expected_shapes(spec)
    for name, shape in expected.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise UnsupportedModel(file.name, f"tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                file.name, f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
    unused = tuple(f"blk.{spec.num_layers + i}." for i in range(spec.num_unused_layers))
    unknown = sorted(set(file.tensors) - set(expected))
    if unknown := [name for name in unknown if not name.startswith(unused)]:
        raise UnsupportedModel(
            file.name,
            f"tensor {unknown[0]} is not part of a {spec.architecture} model as this build "
            f"understands it ({len(unknown)} such tensors)",
        )
