"""A model's weights as the decoder takes them: the arena, matrix offsets by layer, small vectors.

Everything is a pytree, so that a program receives weights as arguments and holds none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.errors import UnsupportedModel
from engine.gguf.arena import Arena, Progress, build_arena, read_vectors
from engine.gguf.reader import GgufFile
from engine.kernels.qmatmul import MatrixStack
from engine.model.spec import LayerSpec, ModelSpec

LayerArrays = Mapping[str, MatrixStack | jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """All weights of a model.

    `runs` has one entry per run of equal layers (`ModelSpec.runs`): name to a stack of L matrices
    or f32 [L, n] vectors. `globals` holds the embedding, the head and vectors that belong to no
    layer, by file name without `.weight`.
    """

    arena: jax.Array
    runs: tuple[LayerArrays, ...]
    globals: LayerArrays


def layer_matrices(layer: LayerSpec) -> dict[str, tuple[int | None, int | None]]:
    """The matrices of a layer: name to (rows, cols), None standing for the model's width."""
    mixer, ffn = layer.mixer, layer.ffn
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    return {
        "attn_q": (queries, None),
        "attn_k": (keys, None),
        "attn_v": (keys, None),
        "attn_output": (None, queries),
        "ffn_gate": (ffn.hidden, None),
        "ffn_up": (ffn.hidden, None),
        "ffn_down": (None, ffn.hidden),
    }


def layer_vectors(layer: LayerSpec, width: int) -> dict[str, int]:
    """The vectors of a layer: file name to length."""
    rows = {name: shape[0] or width for name, shape in layer_matrices(layer).items()}
    biases = {f"{name}.bias": rows[name] for name in layer.mixer.biases | layer.ffn.biases}
    return {"attn_norm.weight": width, "ffn_norm.weight": width} | biases


def global_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The matrices outside the layers: name to (rows, cols)."""
    names = ["token_embd"] if spec.tied_head else ["token_embd", "output"]
    return dict.fromkeys(names, (spec.vocab_size, spec.width))


def global_vectors(spec: ModelSpec) -> dict[str, int]:
    """The vectors outside the layers: file name to length."""
    found = {"output_norm.weight": spec.width}
    for layer in spec.layers:
        if layer.mixer.rope.has_factors:
            found["rope_freqs.weight"] = layer.mixer.rope.dims // 2
    return found


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the file must hold, by its full name, outermost dimension first."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in global_matrices(spec).items():
        shapes[f"{name}.weight"] = shape
    for name, length in global_vectors(spec).items():
        shapes[name] = (length,)
    for i, layer in enumerate(spec.layers):
        for name, (rows, cols) in layer_matrices(layer).items():
            shapes[f"blk.{i}.{name}.weight"] = (rows or spec.width, cols or spec.width)
        for name, length in layer_vectors(layer, spec.width).items():
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


def load_weights(spec: ModelSpec, file: GgufFile, progress: Progress | None = None) -> Weights:
    """Reads all weights of a checked file, matrices into one arena.

    Raises:
        UnsupportedModel: The file does not hold exactly the tensors of `spec`.
        ModelFileError: A tensor's data is damaged.
    """
    check_tensors(spec, file)
    shapes = expected_shapes(spec)
    arena = build_arena(file, [n for n, s in shapes.items() if len(s) == 2], progress)
    vectors = read_vectors(file, [n for n, s in shapes.items() if len(s) == 1])
    runs = tuple(
        _run_arrays(spec, layer, first, count, arena, vectors)
        for layer, first, count in spec.runs()
    )
    outside: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"{name}.weight"]]).single()
        for name in global_matrices(spec)
    }
    outside |= {name: jnp.asarray(vectors[name]) for name in global_vectors(spec)}
    return Weights(jax.device_put(arena.data, may_alias=True), runs, outside)


def _run_arrays(
    spec: ModelSpec,
    layer: LayerSpec,
    first: int,
    count: int,
    arena: Arena,
    vectors: Mapping[str, np.ndarray],
) -> LayerArrays:
    blocks = range(first, first + count)
    arrays: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"blk.{i}.{name}.weight"] for i in blocks])
        for name in layer_matrices(layer)
    }
    for name in layer_vectors(layer, spec.width):
        arrays[name] = jnp.asarray(np.stack([vectors[f"blk.{i}.{name}"] for i in blocks]))
    return arrays
