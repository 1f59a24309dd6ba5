"""A model's weights as the decoder takes them: the arena, matrix offsets by layer, small vectors.

Everything is a pytree, so that a program receives weights as arguments and holds none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.errors import UnsupportedModel
from engine.gguf.arena import Arena, Progress, build_arena, read_vectors
from engine.gguf.reader import GgufFile
from engine.kernels.qmatmul import MatrixStack
from engine.model.spec import BlockSpec, ModelSpec, QkNorm

LayerArrays = Mapping[str, MatrixStack | jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arena", "runs", "globals"],
    meta_fields=["is_native"],
)
@dataclass(frozen=True)
class Weights:
    """All weights of a model. `is_native`: laid out for the native kernels.

    `runs` has one entry per run of equal blocks (`ModelSpec.runs`): name to a stack of L matrices
    or f32 [L, n] vectors. `globals` holds the embedding, the head and vectors that belong to no
    layer. Matrices are named as in the file without `.weight`, vectors as in the file.
    """

    arena: jax.Array
    runs: tuple[LayerArrays, ...]
    globals: LayerArrays
    is_native: bool = False


def block_matrices(block: BlockSpec, width: int) -> dict[str, tuple[int, int]]:
    """The matrices of a block: name to (rows, cols)."""
    mixer, ffn = block.mixer, block.ffn
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    found: dict[str, tuple[int, int]] = {}
    if mixer.is_fused:
        found["attn_qkv"] = (queries + 2 * keys, width)
    else:
        found |= {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width)}
    found["attn_output"] = (width, queries)
    if ffn.is_fused:
        found["ffn_up"] = (2 * ffn.hidden, width)
    else:
        found |= {"ffn_gate": (ffn.hidden, width), "ffn_up": (ffn.hidden, width)}
    found["ffn_down"] = (width, ffn.hidden)
    return found


def block_vectors(block: BlockSpec, width: int) -> dict[str, int]:
    """The vectors of a block: file name to length."""
    mixer = block.mixer
    rows = {name: shape[0] for name, shape in block_matrices(block, width).items()}
    found = {f"{name}.bias": rows[name] for name in mixer.biases | block.ffn.biases}
    if block.has_pre_norms:
        found |= {"attn_norm.weight": width, "ffn_norm.weight": width}
    if block.has_post_norms:
        found |= {"post_attention_norm.weight": width, "post_ffw_norm.weight": width}
    if mixer.qk_norm is not QkNorm.NONE:
        per_head = mixer.qk_norm is QkNorm.HEAD
        found["attn_q_norm.weight"] = mixer.head_dim * (1 if per_head else mixer.num_heads)
        found["attn_k_norm.weight"] = mixer.head_dim * (1 if per_head else mixer.num_kv_heads)
    return found


def global_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The matrices outside the layers: name to (rows, cols)."""
    names = ["token_embd"] if spec.tied_head else ["token_embd", "output"]
    return dict.fromkeys(names, (spec.vocab_size, spec.width))


def global_vectors(spec: ModelSpec) -> dict[str, int]:
    """The vectors outside the layers: file name to length."""
    found = {"output_norm.weight": spec.width}
    if spec.has_head_bias:
        found["output.bias"] = spec.vocab_size
    for rope in spec.ropes:
        for name in filter(None, (rope.factors, rope.long_factors)):
            found[name] = rope.dims // 2
    return found


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the file must hold, by its full name, outermost dimension first."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in global_matrices(spec).items():
        shapes[f"{name}.weight"] = shape
    for name, length in global_vectors(spec).items():
        shapes[name] = (length,)
    for i, layer in enumerate(spec.layers):
        for name, shape in block_matrices(layer.block, spec.width).items():
            shapes[f"blk.{i}.{name}.weight"] = shape
        for name, length in block_vectors(layer.block, spec.width).items():
            shapes[f"blk.{i}.{name}"] = (length,)
    return shapes


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
    if unknown := sorted(set(file.tensors) - set(expected)):
        raise UnsupportedModel(
            file.name,
            f"tensor {unknown[0]} is not part of a {spec.architecture} model as this build "
            f"understands it ({len(unknown)} such tensors)",
        )


def load_weights(
    spec: ModelSpec,
    file: GgufFile,
    progress: Progress | None = None,
    *,
    is_native: bool = False,
) -> Weights:
    """Reads all weights of a file, matrices into one arena, laid out for the kernels that run.

    Raises:
        UnsupportedModel: The file does not hold exactly the tensors of `spec`.
        ModelFileError: A tensor's data is damaged.
    """
    check_tensors(spec, file)
    shapes = expected_shapes(spec)
    arena = build_arena(
        file, [n for n, s in shapes.items() if len(s) == 2], progress, tiled=is_native
    )
    vectors = read_vectors(file, [n for n, s in shapes.items() if len(s) == 1])
    runs = tuple(
        _run_arrays(spec, block, first, count, arena, vectors, is_native)
        for block, first, count in spec.runs()
    )
    outside: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"{name}.weight"]], is_native=is_native).single()
        for name in global_matrices(spec)
    }
    outside |= {name: jnp.asarray(vectors[name]) for name in global_vectors(spec)}
    return Weights(jax.device_put(arena.data, may_alias=True), runs, outside, is_native)


def _run_arrays(
    spec: ModelSpec,
    block: BlockSpec,
    first: int,
    count: int,
    arena: Arena,
    vectors: Mapping[str, np.ndarray],
    is_native: bool,
) -> LayerArrays:
    layers = range(first, first + count)
    arrays: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of(
            [arena.matrices[f"blk.{i}.{name}.weight"] for i in layers], is_native=is_native
        )
        for name in block_matrices(block, spec.width)
    }
    for name in block_vectors(block, spec.width):
        arrays[name] = jnp.asarray(np.stack([vectors[f"blk.{i}.{name}"] for i in layers]))
    return arrays
