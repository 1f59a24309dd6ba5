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
from engine.model.expert_cache import CachedExperts, expert_layers, open_experts, stack_names
from engine.model.spec import BlockSpec, ModelSpec, MoeFfnSpec
from engine.model.tensors import (
    array_names,
    block_arrays,
    block_matrices,
    block_tables,
    check_tensors,
    expected_shapes,
    global_matrices,
    global_vectors,
    scoring_arrays,
)

EXPERT_LAYER = "expert_layer"

LayerArrays = Mapping[str, MatrixStack | jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arena", "runs", "globals"],
    meta_fields=["is_native", "experts"],
)
@dataclass(frozen=True)
class Weights:
    """All weights of a model. `is_native`: laid out for the native kernels.

    `runs` has one entry per run of equal blocks (`ModelSpec.runs`): name to a stack of L matrices
    or f32 [L, ...] arrays. `globals` holds the embedding, the head and vectors that belong to no
    layer. Names are those of `engine.model.tensors`. `experts` holds those that are not all in the
    arena; layers then have their number among the layers with experts, int32, as `EXPERT_LAYER`.
    """

    arena: jax.Array
    runs: tuple[LayerArrays, ...]
    globals: LayerArrays
    is_native: bool = False
    experts: CachedExperts | None = None


def load_weights(
    spec: ModelSpec,
    file: GgufFile,
    progress: Progress | None = None,
    *,
    is_native: bool = False,
    expert_slots: int | None = None,
    overlaps: bool = True,
) -> Weights:
    """Reads all weights of a file, matrices into one arena, laid out for the kernels that run.

    Args:
        spec: What the model computes.
        file: Where it is.
        progress: Called with bytes done and in all.
        is_native: Lay matrices out for the native kernels.
        expert_slots: Experts in memory, the others are read when they are needed; None holds all.
        overlaps: Read experts ahead in long steps, where there are slots for it.

    Raises:
        UnsupportedModel: The file does not hold exactly the tensors of `spec`.
        ModelFileError: A tensor's data is damaged.
        InvalidField: There cannot be that many `expert_slots`.
    """
    check_tensors(spec, file)
    small = array_names(spec)
    others = small | scoring_arrays(spec).keys()  # a head that scores texts is read by itself
    matrices = [name for name in expected_shapes(spec) if name not in others]
    experts = None
    if expert_slots is not None:
        experts = open_experts(spec, file, expert_slots, is_native=is_native, overlaps=overlaps)
    if experts is not None:
        matrices = [name for name in matrices if not name.endswith("_exps.weight")]
    arena = build_arena(file, matrices, progress, tiled=is_native)
    arrays = read_arrays(file, small)
    runs = tuple(
        _run_arrays(spec, block, layers, arena, arrays, is_native, experts)
        for block, layers in spec.runs()
    )
    outside: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"{name}.weight"]], is_native=is_native).single()
        for name in global_matrices(spec)
    }
    outside |= {name: jnp.asarray(arrays[name]) for name in global_vectors(spec)}
    data = jax.device_put(arena.data, may_alias=True)
    return Weights(data, runs, outside, is_native, experts)


def _run_arrays(
    spec: ModelSpec,
    block: BlockSpec,
    layers: Sequence[int],
    arena: Arena,
    arrays: Mapping[str, np.ndarray],
    is_native: bool,
    experts: CachedExperts | None,
) -> LayerArrays:
    cached = _cached_arrays(spec, block, layers, experts)
    matrices = block_matrices(block, spec.width)
    in_file = {name: f"{name}.weight" for name in matrices if name not in cached}
    in_file |= {name: name for name in block_tables(block, spec.width)}
    found: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of(
            [arena.matrices[f"blk.{i}.{full_name}"] for i in layers], is_native=is_native
        )
        for name, full_name in in_file.items()
    }
    for name in block_arrays(block, spec.width):
        found[name] = jnp.asarray(np.stack([arrays[f"blk.{i}.{name}"] for i in layers]))
    return found | cached


def _cached_arrays(
    spec: ModelSpec, block: BlockSpec, layers: Sequence[int], experts: CachedExperts | None
) -> dict[str, MatrixStack | jax.Array]:
    """The stacks of some layers whose experts are in a cache's slots."""
    if experts is None or not isinstance(block.ffn, MoeFfnSpec):
        return {}
    numbers = [expert_layers(spec).index(i) for i in layers]
    stacks: dict[str, MatrixStack | jax.Array] = {
        name: experts.stack(numbers, index) for index, name in enumerate(stack_names(block.ffn))
    }
    return stacks | {EXPERT_LAYER: jnp.array(numbers, jnp.int32)}
