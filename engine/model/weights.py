"""A model's weights as the decoder takes them: the arena, matrix offsets by layer, small vectors.

Everything is a pytree, so that a program receives weights as arguments and holds none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.errors import UnsupportedModel
from engine.gguf.arena import Arena, Progress, build_arena, read_arrays
from engine.gguf.reader import GgufFile
from engine.kernels.qmatmul import MatrixStack
from engine.model.recurrent_tensors import recurrent_arrays, recurrent_matrices
from engine.model.spec import AttentionSpec, BlockSpec, DenseFfnSpec, ModelSpec, QkNorm

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
    or f32 [L, ...] arrays. `globals` holds the embedding, the head and vectors that belong to no
    layer. Matrices are named as in the file without `.weight`, vectors as in the file.
    """

    arena: jax.Array
    runs: tuple[LayerArrays, ...]
    globals: LayerArrays
    is_native: bool = False


def block_matrices(block: BlockSpec, width: int) -> dict[str, tuple[int, int]]:
    """The matrices of a block: name to (rows, cols)."""
    found: dict[str, tuple[int, int]] = {}
    if block.mixer is not None:
        found |= _attention_matrices(block.mixer, width)
    if block.recurrent is not None:
        found |= recurrent_matrices(block.recurrent, width)
    if block.ffn is not None:
        found |= _ffn_matrices(block.ffn, width)
    return found


def _attention_matrices(mixer: AttentionSpec, width: int) -> dict[str, tuple[int, int]]:
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    output = {"attn_output": (width, queries)}
    if mixer.is_fused:
        return {"attn_qkv": (queries + 2 * keys, width)} | output
    rows = 2 * queries if mixer.has_gate else queries
    return {"attn_q": (rows, width), "attn_k": (keys, width), "attn_v": (keys, width)} | output


def _ffn_matrices(ffn: DenseFfnSpec, width: int) -> dict[str, tuple[int, int]]:
    down = {"ffn_down": (width, ffn.hidden)}
    if ffn.is_fused:
        return {"ffn_up": (2 * ffn.hidden, width)} | down
    return {"ffn_gate": (ffn.hidden, width), "ffn_up": (ffn.hidden, width)} | down


def block_vectors(block: BlockSpec, width: int) -> dict[str, int]:
    """The vectors of a block's attention, feed-forward and norms: file name to length."""
    mixer, ffn = block.mixer, block.ffn
    rows = {name: shape[0] for name, shape in block_matrices(block, width).items()}
    parts = (part for part in (mixer, ffn) if part is not None)
    found = {f"{name}.bias": rows[name] for part in parts for name in part.biases}
    norms = ["attn_norm.weight"] if block.has_pre_norms else []
    norms += ["post_attention_norm.weight"] if block.has_post_norms else []
    if ffn is not None:
        norms += [block.ffn_norm] if block.has_pre_norms else []
        norms += ["post_ffw_norm.weight"] if block.has_post_norms else []
    found |= dict.fromkeys(norms, width)
    if mixer is not None and mixer.qk_norm is not QkNorm.NONE:
        per_head = mixer.qk_norm is QkNorm.HEAD
        found["attn_q_norm.weight"] = mixer.head_dim * (1 if per_head else mixer.num_heads)
        found["attn_k_norm.weight"] = mixer.head_dim * (1 if per_head else mixer.num_kv_heads)
    return found


def block_arrays(block: BlockSpec, width: int) -> dict[str, tuple[int, ...]]:
    """Everything of a block that no product takes, its vectors too: file name to shape."""
    found: dict[str, tuple[int, ...]] = {
        name: (length,) for name, length in block_vectors(block, width).items()
    }
    return found | (recurrent_arrays(block.recurrent) if block.recurrent else {})


def global_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The matrices outside the layers: name to (rows, cols)."""
    names = ["token_embd"] if spec.tied_head else ["token_embd", "output"]
    return dict.fromkeys(names, (spec.vocab_size, spec.width))


def global_vectors(spec: ModelSpec) -> dict[str, int]:
    """The vectors outside the layers: file name to length."""
    found = {spec.output_norm: spec.width}
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
        for name, shape in block_arrays(layer.block, spec.width).items():
            shapes[f"blk.{i}.{name}"] = shape
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
    unused = tuple(f"blk.{spec.num_layers + i}." for i in range(spec.num_unused_layers))
    unknown = sorted(set(file.tensors) - set(expected))
    if unknown := [name for name in unknown if not name.startswith(unused)]:
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
    small = _small_tensors(spec)
    matrices = [name for name in expected_shapes(spec) if name not in small]
    arena = build_arena(file, matrices, progress, tiled=is_native)
    vectors = read_arrays(file, small)
    runs = tuple(
        _run_arrays(spec, block, layers, arena, vectors, is_native) for block, layers in spec.runs()
    )
    outside: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"{name}.weight"]], is_native=is_native).single()
        for name in global_matrices(spec)
    }
    outside |= {name: jnp.asarray(vectors[name]) for name in global_vectors(spec)}
    return Weights(jax.device_put(arena.data, may_alias=True), runs, outside, is_native)


def _small_tensors(spec: ModelSpec) -> set[str]:
    """The full names of all that no product takes."""
    names = set(global_vectors(spec))
    for i, layer in enumerate(spec.layers):
        names |= {f"blk.{i}.{name}" for name in block_arrays(layer.block, spec.width)}
    return names


def _run_arrays(
    spec: ModelSpec,
    block: BlockSpec,
    layers: Sequence[int],
    arena: Arena,
    vectors: Mapping[str, np.ndarray],
    is_native: bool,
) -> LayerArrays:
    arrays: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of(
            [arena.matrices[f"blk.{i}.{name}.weight"] for i in layers], is_native=is_native
        )
        for name in block_matrices(block, spec.width)
    }
    for name in block_arrays(block, spec.width):
        arrays[name] = jnp.asarray(np.stack([vectors[f"blk.{i}.{name}"] for i in layers]))
    return arrays
