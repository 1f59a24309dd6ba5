"""The moe_cache pool of a model: all of its experts in memory, or some of them in slots.

With all in memory programs read them from one array, without asking anybody. With fewer a step asks
for what it needs: the store decides what is in which slot, natively from inside the step, on XLA by
a callback that copies the records, because a program there cannot look at memory that changes.
`resize` goes from any size to any other and carries over what is in memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from engine.gguf.arena import Bytes, Matrix
from engine.gguf.expert_records import ExpertRecords
from engine.gguf.layouts import BLOCK_BYTES
from engine.gguf.reader import GgufFile
from engine.kernels.native import encode
from engine.kernels.native.expert_cache import NativeExpertCache, cached_products, ensure_experts
from engine.kernels.qmatmul import MatrixStack, expert_products, stack_table
from engine.memory.expert_store import Expert, ExpertShape, ExpertStore
from engine.memory.region import Region
from engine.model.spec import ModelSpec, MoeFfnSpec

EXPERT_LAYER = "expert_layer"
_READERS = 2

Int32 = npt.NDArray[np.int32]
Products = Callable[[Sequence[MatrixStack], jax.Array, jax.Array], list[jax.Array]]
Places = Mapping[Expert, int]
"""The first block of each record."""


class StaleExperts(RuntimeError):
    """A program asked with the epoch of a pool that has another size by now; nothing was read."""


@dataclass(frozen=True)
class Brought:
    """Experts that are there: `ids` int32 [N, K] name them for `products`, see `expert_products`."""

    ids: jax.Array
    products: Products


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arena", "epoch"], meta_fields=["pool"]
)
@dataclass(frozen=True)
class ExpertView:
    """What programs are given of the experts.

    `arena` uint8 [blocks, 64] holds them all; None where they are in slots, which may be asked for
    with `epoch`, an int32 scalar: one of an earlier size is refused.
    """

    arena: jax.Array | None
    epoch: jax.Array | None
    pool: ExpertPool

    def bring(self, layer: jax.Array, ids: jax.Array) -> Brought:
        """Makes a layer's experts int32 [N, K] ready; `layer` counts those with experts."""
        if self.arena is not None:
            return Brought(ids, functools.partial(expert_products, self.arena))
        assert self.epoch is not None
        return self.pool.bring(self.epoch, layer, ids)


class ExpertPool:
    """The experts of a model. Programs that were traced with it need it to live.

    All but `store`'s figures is for whoever runs the programs, between two of them.
    """

    def __init__(
        self, shape: ExpertShape, records: ExpertRecords, *, is_native: bool, overlaps: bool = True
    ) -> None:
        """Makes a pool without memory; `resize` gives it some.

        Args:
            shape: What the experts are.
            records: Where they are; closed with this.
            is_native: Whether the native kernels multiply.
            overlaps: See `ExpertStore`.
        """
        self.shape = shape
        self.records = records
        self._reader = encode.RecordReader(records, shape.num_layers) if is_native else None
        self.store = ExpertStore(
            shape,
            self._reader.read if self._reader else self._read_slowly,
            overlaps=overlaps,
            reader_shares=self._reader is not None and self._reader.shares,
        )
        self.view: ExpertView | None = None
        self._is_native = is_native
        self._native: NativeExpertCache | None = None
        self._region: Region | None = None
        self._epoch = 0

    def _read_slowly(self, layer: int, expert: int, part: int, target: Bytes) -> None:
        del part
        self.records.read(layer, expert, target)

    @property
    def num_slots(self) -> int:
        """The size: experts that fit in memory."""
        return self.store.num_slots

    def close(self) -> None:
        """Ends reading; no program may run any more."""
        self._shut()
        self.store.close()
        self.records.close()

    # What programs are compiled for.

    def planned(self, num_slots: int) -> ExpertView:
        """The view of a size, with shapes for its arrays."""
        if num_slots < self.shape.ceiling:
            return ExpertView(None, jax.ShapeDtypeStruct((), jnp.int32), self)  # pyright: ignore[reportArgumentType] -- as jax lowers it
        blocks = (self._num_blocks(num_slots), BLOCK_BYTES)
        return ExpertView(jax.ShapeDtypeStruct(blocks, jnp.uint8), None, self)  # pyright: ignore[reportArgumentType] -- as jax lowers it

    def stack(self, layers: Sequence[int], index: int, num_slots: int) -> MatrixStack:
        """Where stack `index` of some of the layers with experts lies, at a size."""
        is_whole = num_slots == self.shape.ceiling
        places = [
            self._matrix(layer, index, self._first_block(layer) if is_whole else 0, is_whole)
            for layer in layers
        ]
        return MatrixStack.of(places, is_native=self._is_native)

    def _matrix(self, layer: int, index: int, first: int, is_whole: bool) -> Matrix:
        place = self.records.matrices(layer)[index]
        return dataclasses.replace(
            place,
            codes_block=first + place.codes_block,
            scales_block=None if place.scales_block is None else first + place.scales_block,
            offsets_block=None if place.offsets_block is None else first + place.offsets_block,
            count=self.shape.num_experts,
            stride_blocks=self.records.blocks_of(layer) if is_whole else self._slot_blocks,
        )

    @property
    def _slot_blocks(self) -> int:
        return self.shape.slot_bytes // BLOCK_BYTES

    def _first_block(self, layer: int) -> int:
        """Of a layer, where all are in memory one behind another."""
        before = sum(self.records.blocks_of(each) for each in range(layer))
        return self.shape.num_experts * before

    def _num_blocks(self, num_slots: int) -> int:
        if num_slots < self.shape.ceiling:
            return num_slots * self._slot_blocks
        return self._first_block(self.shape.num_layers)

    # Other sizes.

    def resize(self, num_slots: int, on_read: Callable[[int], None] | None = None) -> None:
        """Gives the pool another size and keeps the experts in memory that are used most.

        Views and epochs from before are refused afterwards. What fails after memory was found
        leaves no expert in memory, and another call, of any size, reads them anew.

        Args:
            num_slots: From the floor on; the ceiling holds all, which are read now.
            on_read: Called with the bytes of the file that were read since the last call.

        Raises:
            MemoryError: There is no room; nothing has changed.
            OSError: The file cannot be read.
            ModelFileError: It is not what it was when it was opened.
        """
        self.store.settle()
        kept = self.store.most_used(num_slots)
        region = Region(self._num_blocks(num_slots) * BLOCK_BYTES)
        blocks = region.data.reshape(-1, BLOCK_BYTES)
        is_whole = num_slots == self.shape.ceiling
        places = self._places_of_all() if is_whole else self._places_in_slots(kept)
        self._move(kept, blocks, places)
        self._shut()
        if not is_whole:
            self._open_slots(num_slots, region, kept)
            return
        missing = [expert for expert in places if expert not in set(kept)]
        self._read(missing, blocks, places, on_read or (lambda _: None))
        self._open_all(region)

    def _places_of_all(self) -> Places:
        first = {layer: self._first_block(layer) for layer in range(self.shape.num_layers)}
        return {
            (layer, expert): first[layer] + expert * self.records.blocks_of(layer)
            for layer in range(self.shape.num_layers)
            for expert in range(self.shape.num_experts)
        }

    def _places_in_slots(self, experts: Sequence[Expert]) -> Places:
        return {expert: slot * self._slot_blocks for slot, expert in enumerate(experts)}

    def _move(self, experts: Sequence[Expert], blocks: Bytes, places: Places) -> None:
        """Copies records, giving the old memory back behind them: both are never there in full."""
        if not experts:
            return
        view = self.view
        assert view is not None
        if view.arena is None:
            slots, store = self._slot_blocks, self.store
            old = store.slots.reshape(-1, BLOCK_BYTES)
            old_places = {(i, e): int(store.slot_of[i, e]) * slots for i, e in experts}
        else:
            # In the host's own memory if the device is the host.
            old = self._region.data.reshape(-1, BLOCK_BYTES) if self._region else view.arena
            old, old_places = np.asarray(old), self._places_of_all()
        for expert in sorted(experts, key=old_places.__getitem__):
            count, first = self.records.blocks_of(expert[0]), old_places[expert]
            blocks[places[expert] :][:count] = old[first : first + count]
            if self._region:
                self._region.release_until(first * BLOCK_BYTES)

    def _read(
        self,
        experts: Sequence[Expert],
        blocks: Bytes,
        places: Places,
        on_read: Callable[[int], None],
    ) -> None:
        def read(expert: Expert) -> int:
            layer, first = expert[0], places[expert]
            record = blocks[first : first + self.records.blocks_of(layer)]
            self.store.read(*expert, record.reshape(-1))
            return self.records.file_bytes(layer)

        with ThreadPoolExecutor(_READERS, thread_name_prefix="experts") as threads:
            reading = [threads.submit(read, expert) for expert in experts]
            try:
                for done in as_completed(reading):
                    on_read(done.result())
            finally:
                threads.shutdown(cancel_futures=True)

    def _shut(self) -> None:
        """Nothing is in memory any more, and every view is refused."""
        if self._native:
            self._native.close()
        if self.view is not None and self.view.arena is not None:
            self.view.arena.delete()
        self._native = self.view = self._region = None
        self._epoch += 1
        self.store.take(np.zeros((0, self.shape.slot_bytes), np.uint8))

    def _open_slots(self, num_slots: int, region: Region, held: Sequence[Expert]) -> None:
        self._region = region
        self.store.take(region.data.reshape(num_slots, self.shape.slot_bytes), held)
        if self._is_native:
            self._native = NativeExpertCache(self.store)
            self._epoch = self._native.number
        self.view = ExpertView(None, jnp.int32(self._epoch), self)

    def _open_all(self, region: Region) -> None:
        arena = jax.device_put(region.data.reshape(-1, BLOCK_BYTES), may_alias=True)
        jax.block_until_ready(arena)
        if jax.default_backend() == "cpu":
            self._region = region  # the same memory
        self.view = ExpertView(arena, None, self)
        self.store.take_all()

    # What steps ask for.

    def bring(self, epoch: jax.Array, layer: jax.Array, ids: jax.Array) -> Brought:
        """See `ExpertView.bring`."""
        if self._is_native:

            def products(
                stacks: Sequence[MatrixStack], x: jax.Array, ids: jax.Array
            ) -> list[jax.Array]:
                return _native_products(epoch, stacks, x, ids)

            return Brought(ensure_experts(epoch, layer, ids), products)
        shape = self.shape
        most = min(shape.num_experts, ids.size)
        results = (
            jax.ShapeDtypeStruct((most, shape.slot_bytes), jnp.uint8),
            jax.ShapeDtypeStruct(ids.shape, jnp.int32),
        )
        records, local = jax.pure_callback(self._fetch, results, epoch, layer, ids)
        arena = records.reshape(-1, BLOCK_BYTES)

        def xla_products(
            stacks: Sequence[MatrixStack], x: jax.Array, ids: jax.Array
        ) -> list[jax.Array]:
            few = [dataclasses.replace(stack, count=most) for stack in stacks]
            return expert_products(arena, few, x, ids)

        return Brought(local, xla_products)

    def _fetch(
        self, epoch: jax.Array, layer: jax.Array, ids: jax.Array
    ) -> tuple[npt.NDArray[np.uint8], Int32]:
        """The records of the experts that are needed, and each pair's place among them."""
        if int(epoch) != self._epoch:
            raise StaleExperts(f"epoch {int(epoch)} is over, {self._epoch} runs")
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
    epoch: jax.Array, stacks: Sequence[MatrixStack], x: jax.Array, slots: jax.Array
) -> list[jax.Array]:
    table, layouts = stack_table(stacks)
    rows = [stack.rows for stack in stacks]
    y = cached_products(epoch, table, x, slots, rows, layouts)
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
    records = _open_records(spec, file, is_native=is_native)
    if records is None:
        return None
    records.close()
    return _shape(spec, records)


def open_experts(
    spec: ModelSpec, file: GgufFile, *, is_native: bool, overlaps: bool
) -> ExpertPool | None:
    """Returns a pool without memory; None if the model has no experts. Raises as `expert_shape`."""
    records = _open_records(spec, file, is_native=is_native)
    if records is None:
        return None
    return ExpertPool(_shape(spec, records), records, is_native=is_native, overlaps=overlaps)


def _shape(spec: ModelSpec, records: ExpertRecords) -> ExpertShape:
    routers = [_experts_of(spec, i).router for i in expert_layers(spec)]
    most_used = max(router.num_used for router in routers)
    slot_bytes = records.num_blocks * BLOCK_BYTES
    return ExpertShape(len(routers), routers[0].num_experts, most_used, slot_bytes)


def _experts_of(spec: ModelSpec, layer: int) -> MoeFfnSpec:
    ffn = spec.layers[layer].block.ffn
    assert isinstance(ffn, MoeFfnSpec)
    return ffn


def _open_records(spec: ModelSpec, file: GgufFile, *, is_native: bool) -> ExpertRecords | None:
    names = [
        [f"blk.{i}.{name}.weight" for name in stack_names(_experts_of(spec, i))]
        for i in expert_layers(spec)
    ]
    if not names:
        return None
    return ExpertRecords(file, names, tiled=is_native, fill=encode.fill if is_native else None)
