"""Experts that are not all in memory, as the decoder takes them: brought in, then multiplied.

Where all are resident none of this runs. The store decides what is in which slot; here its slots
become what products read: natively the slots themselves, on XLA a copy of the records that a step
needs, because a program there cannot look at memory that changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from engine.errors import InvalidField
from engine.gguf.expert_records import ExpertRecords
from engine.gguf.layouts import BLOCK_BYTES
from engine.gguf.reader import GgufFile
from engine.kernels.native.expert_cache import NativeExpertCache, cached_products, ensure_experts
from engine.kernels.qmatmul import MatrixStack, expert_products, stack_table
from engine.memory.expert_store import ExpertShape, ExpertStore
from engine.model.spec import ModelSpec, MoeFfnSpec

Int32 = npt.NDArray[np.int32]
Products = Callable[[Sequence[MatrixStack], jax.Array, jax.Array], list[jax.Array]]


@dataclass(frozen=True)
class Brought:
    """Experts that are there: `ids` int32 [N, K] name them for `products`, see `expert_products`."""

    ids: jax.Array
    products: Products


class CachedExperts:
    """The experts of a model in slots. Programs that were traced with it need it to live."""

    def __init__(self, store: ExpertStore, records: ExpertRecords, *, is_native: bool) -> None:
        """Makes a store known to the kernels, if it is they that multiply."""
        self.store = store
        self.records = records
        self._native = NativeExpertCache(store) if is_native else None

    def close(self) -> None:
        """Ends reading; no program may run any more."""
        if self._native:
            self._native.close()
        self.store.close()
        self.records.close()

    def stack(self, layers: Sequence[int], index: int) -> MatrixStack:
        """Where stack `index` lies in the slots, for some of the layers with experts."""
        slot_blocks = self.store.shape.slot_bytes // BLOCK_BYTES
        places = [
            dataclasses.replace(
                self.records.matrices(layer)[index],
                count=self.store.num_slots,
                stride_blocks=slot_blocks,
            )
            for layer in layers
        ]
        return MatrixStack.of(places, is_native=self._native is not None)

    def bring(self, layer: jax.Array, ids: jax.Array) -> Brought:
        """Makes a layer's experts int32 [N, K] ready; `layer` counts those with experts."""
        if self._native:
            number = self._native.number

            def products(
                stacks: Sequence[MatrixStack], x: jax.Array, ids: jax.Array
            ) -> list[jax.Array]:
                return _native_products(number, stacks, x, ids)

            return Brought(ensure_experts(number, layer, ids), products)
        shape = self.store.shape
        most = min(shape.num_experts, ids.size)
        results = (
            jax.ShapeDtypeStruct((most, shape.slot_bytes), jnp.uint8),
            jax.ShapeDtypeStruct(ids.shape, jnp.int32),
        )
        records, local = jax.pure_callback(self._fetch, results, layer, ids)
        arena = records.reshape(-1, BLOCK_BYTES)

        def xla_products(
            stacks: Sequence[MatrixStack], x: jax.Array, ids: jax.Array
        ) -> list[jax.Array]:
            few = [dataclasses.replace(stack, count=most) for stack in stacks]
            return expert_products(arena, few, x, ids)

        return Brought(local, xla_products)

    def _fetch(self, layer: jax.Array, ids: jax.Array) -> tuple[npt.NDArray[np.uint8], Int32]:
        """The records of the experts that are needed, and each pair's place among them."""
        own, pairs = int(layer), np.asarray(ids)
        needed, local = np.unique(pairs, return_inverse=True)
        store = self.store
        store.count_uses(own, pairs)
        is_long = pairs.size >= store.shape.num_experts
        store.ensure(own, needed.tolist(), is_long=is_long)
        records = np.zeros(
            (min(store.shape.num_experts, pairs.size), store.shape.slot_bytes), np.uint8
        )
        records[: len(needed)] = store.slots[store.slot_of[own, needed]]
        return records, local.reshape(pairs.shape).astype(np.int32)


def _native_products(
    number: int, stacks: Sequence[MatrixStack], x: jax.Array, slots: jax.Array
) -> list[jax.Array]:
    table, layouts = stack_table(stacks)
    rows = [stack.rows for stack in stacks]
    y = cached_products(number, table, x, slots, rows, layouts)
    parts = jnp.split(y, np.cumsum(rows)[:-1].tolist(), axis=-1)
    return [part.reshape(*slots.shape, part.shape[-1]) for part in parts]


def expert_layers(spec: ModelSpec) -> tuple[int, ...]:
    """The layers that have experts."""
    return tuple(i for i, x in enumerate(spec.layers) if isinstance(x.block.ffn, MoeFfnSpec))


def stack_names(ffn: MoeFfnSpec) -> tuple[str, ...]:
    """The stacks of a layer, in the order of a record."""
    return (*ffn.inputs, "ffn_down_exps")


def expert_shape(spec: ModelSpec, file: GgufFile, *, is_native: bool) -> ExpertShape | None:
    """What the experts of a model take; None if it has none.

    Raises:
        ModelFileError: A tensor is missing, or the file was changed meanwhile.
        UnsupportedModel: A tensor is of a type without a layout.
    """
    routers = [_experts_of(spec, i).router for i in expert_layers(spec)]
    if not routers:
        return None
    records = _open_records(spec, file, is_native=is_native)
    slot_bytes = records.num_blocks * BLOCK_BYTES
    records.close()
    most_used = max(router.num_used for router in routers)
    return ExpertShape(len(routers), routers[0].num_experts, most_used, slot_bytes)


def open_experts(
    spec: ModelSpec, file: GgufFile, num_slots: int, *, is_native: bool, overlaps: bool
) -> CachedExperts | None:
    """Opens a cache of `num_slots` experts; None if that many are all of them.

    Raises:
        InvalidField: The model has no experts, the size is out of range, or memory is out.
        ModelFileError: The file was changed meanwhile.
    """
    shape = expert_shape(spec, file, is_native=is_native)
    if shape is None:
        raise InvalidField("moe_cache_slots", "the model has no experts")
    if shape.checked(num_slots) == shape.ceiling:
        return None
    records = _open_records(spec, file, is_native=is_native)
    try:
        store = ExpertStore(shape, num_slots, records.read, overlaps=overlaps)
        return CachedExperts(store, records, is_native=is_native)
    except BaseException:
        records.close()
        raise


def _experts_of(spec: ModelSpec, layer: int) -> MoeFfnSpec:
    ffn = spec.layers[layer].block.ffn
    assert isinstance(ffn, MoeFfnSpec)
    return ffn


def _open_records(spec: ModelSpec, file: GgufFile, *, is_native: bool) -> ExpertRecords:
    names = [
        [f"blk.{i}.{name}.weight" for name in stack_names(_experts_of(spec, i))]
        for i in expert_layers(spec)
    ]
    return ExpertRecords(file, names, tiled=is_native)
