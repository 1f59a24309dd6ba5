"""A model's weights as the decoder takes them: the arena, matrix offsets by layer, small vectors.

Everything is a pytree, so that a program receives weights as arguments and holds none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from engine.errors import InvalidField, UnsupportedModel
from engine.gguf.arena import Arena, Progress, build_arena, read_arrays
from engine.gguf.reader import GgufFile
from engine.kernels.qmatmul import MatrixStack
from engine.model.expert_pool import (
    EXPERT_LAYER,
    ExpertPool,
    ExpertView,
    expert_layers,
    open_experts,
    stack_names,
)
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

LayerArrays = Mapping[str, MatrixStack | jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arena", "runs", "globals", "experts"],
    meta_fields=["is_native"],
)
@dataclass(frozen=True)
class Weights:
    """All weights of a model. `is_native`: laid out for the native kernels.

    `runs` has one entry per run of equal blocks (`ModelSpec.runs`): name to a stack of L matrices
    or f32 [L, ...] arrays. `globals` holds the embedding, the head and vectors that belong to no
    layer. Names are those of `engine.model.tensors`. The experts of models that have some are not
    in the arena but in `experts`, as their pool has them; layers with experts have their number
    among those, int32, as `EXPERT_LAYER`.
    """

    arena: jax.Array
    runs: tuple[LayerArrays, ...]
    globals: LayerArrays
    is_native: bool = False
    experts: ExpertView | None = None

    def with_experts(self, spec: ModelSpec, view: ExpertView, num_slots: int) -> Weights:
        """The same with another view of the experts, of a pool of `num_slots`."""
        numbers = {layer: number for number, layer in enumerate(expert_layers(spec))}
        runs = tuple(
            {**run, **_expert_stacks(view.pool, block, [numbers[i] for i in layers], num_slots)}
            if isinstance(block.ffn, MoeFfnSpec)
            else run
            for run, (block, layers) in zip(self.runs, spec.runs(), strict=True)
        )
        return replace(self, runs=runs, experts=view)


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
    experts = open_experts(spec, file, is_native=is_native, overlaps=overlaps)
    if experts is None and expert_slots is not None:
        raise InvalidField("moe_cache_slots", "the model has no experts")
    try:
        return _load(spec, file, progress or _ignore, is_native, experts, expert_slots)
    except BaseException:
        if experts is not None:
            experts.close()
        raise


def _load(
    spec: ModelSpec,
    file: GgufFile,
    progress: Progress,
    is_native: bool,
    experts: ExpertPool | None,
    expert_slots: int | None,
) -> Weights:
    num_slots = 0
    if experts is not None:
        shape = experts.shape
        num_slots = shape.ceiling if expert_slots is None else shape.checked(expert_slots)
    small = array_names(spec)
    stacks = _expert_names(spec) if experts is not None else frozenset[str]()
    # A head that scores texts is read by itself, experts by their pool.
    others = small | scoring_arrays(spec).keys() | stacks
    matrices = [name for name in expected_shapes(spec) if name not in others]
    total = sum(file.tensors[name].nbytes for name in matrices)
    if experts is not None and num_slots == experts.shape.ceiling:
        total += sum(file.tensors[name].nbytes for name in stacks)
    arena = build_arena(file, matrices, lambda done, _: progress(done, total), tiled=is_native)
    arrays = read_arrays(file, small)
    runs = tuple(
        _run_arrays(spec, block, layers, arena, arrays, is_native) for block, layers in spec.runs()
    )
    outside: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of([arena.matrices[f"{name}.weight"]], is_native=is_native).single()
        for name in global_matrices(spec)
    }
    vectors = {name: arrays[name] for name in global_vectors(spec)}
    outside |= jax.device_put(vectors, may_alias=False)
    data = jax.device_put(arena.data, may_alias=True)
    weights = Weights(data, runs, outside, is_native)
    if experts is None:
        return weights
    done = sum(file.tensors[name].nbytes for name in matrices)

    def on_read(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    _give_memory(file, experts, num_slots, expert_slots, on_read)
    assert experts.view is not None
    return weights.with_experts(spec, experts.view, num_slots)


def _give_memory(
    file: GgufFile,
    experts: ExpertPool,
    num_slots: int,
    given: int | None,
    on_read: Callable[[int], None],
) -> None:
    try:
        experts.resize(num_slots, on_read)
    except MemoryError as error:
        detail = f"{num_slots} experts of {experts.shape.slot_bytes} bytes do not fit into memory"
        if given is not None:
            raise InvalidField("moe_cache_slots", detail) from error
        raise UnsupportedModel(path=file.name, detail=detail) from error


def _ignore(done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _expert_names(spec: ModelSpec) -> frozenset[str]:
    """The tensors that the expert pool holds."""
    return frozenset(
        f"blk.{i}.{name}.weight"
        for i in expert_layers(spec)
        if isinstance(ffn := spec.layers[i].block.ffn, MoeFfnSpec)
        for name in stack_names(ffn)
    )


def _run_arrays(
    spec: ModelSpec,
    block: BlockSpec,
    layers: Sequence[int],
    arena: Arena,
    arrays: Mapping[str, np.ndarray],
    is_native: bool,
) -> LayerArrays:
    in_file = {name: f"{name}.weight" for name in block_matrices(block, spec.width)}
    if isinstance(block.ffn, MoeFfnSpec):
        for name in stack_names(block.ffn):
            del in_file[name]
    in_file |= {name: name for name in block_tables(block, spec.width)}
    found: dict[str, MatrixStack | jax.Array] = {
        name: MatrixStack.of(
            [arena.matrices[f"blk.{i}.{full_name}"] for i in layers], is_native=is_native
        )
        for name, full_name in in_file.items()
    }
    stacks = {
        name: np.stack([arrays[f"blk.{i}.{name}"] for i in layers])
        for name in block_arrays(block, spec.width)
    }
    return found | jax.device_put(stacks, may_alias=False)


def _expert_stacks(
    pool: ExpertPool, block: BlockSpec, numbers: Sequence[int], num_slots: int
) -> LayerArrays:
    """The experts' stacks of some layers, which have these numbers among those with experts."""
    assert isinstance(block.ffn, MoeFfnSpec)
    stacks: dict[str, MatrixStack | jax.Array] = {
        name: pool.stack(numbers, index, num_slots)
        for index, name in enumerate(stack_names(block.ffn))
    }
    return stacks | {EXPERT_LAYER: jnp.array(numbers, jnp.int32)}
