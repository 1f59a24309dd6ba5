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

from engine.gguf.arena import Arena, Progress, build_arena, read_arrays
from engine.gguf.reader import GgufFile
from engine.kernels.qmatmul import MatrixStack
from engine.model.spec import BlockSpec, ModelSpec
from engine.model.tensors import (
    array_names,
    block_arrays,
    block_matrices,
    block_tables,
    check_tensors,
    expected_shapes,
    global_matrices,
    global_vectors,
)

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
    layer. Names are those of `engine.model.tensors`.
    """

    arena: jax.Array
    runs: tuple[LayerArrays, ...]
    globals: LayerArrays
    is_native: bool = False


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
    small = array_names(spec)
    matrices = [name for name in expected_shapes(spec) if name not in small]
    arena = build_arena(file, matrices, progress, tiled=is_native)
    arrays = read_arrays(file, small)
    runs = tuple(
        _run_arrays(spec, block, layers, arena, arrays, is_native) for block, layers in spec.runs()
    )
    outside: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"{name}.weight"]], is_native=is_native).single()
        for name in global_matrices(spec)
    }
    outside |= {name: jnp.asarray(arrays[name]) for name in global_vectors(spec)}
    return Weights(jax.device_put(arena.data, may_alias=True), runs, outside, is_native)


def _run_arrays(
    spec: ModelSpec,
    block: BlockSpec,
    layers: Sequence[int],
    arena: Arena,
    arrays: Mapping[str, np.ndarray],
    is_native: bool,
) -> LayerArrays:
    in_file = {name: f"{name}.weight" for name in block_matrices(block, spec.width)}
    in_file |= {name: name for name in block_tables(block, spec.width)}
    found: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of(
            [arena.matrices[f"blk.{i}.{full_name}"] for i in layers], is_native=is_native
        )
        for name, full_name in in_file.items()
    }
    for name in block_arrays(block, spec.width):
        found[name] = jnp.asarray(np.stack([arrays[f"blk.{i}.{name}"] for i in layers]))
    return found
