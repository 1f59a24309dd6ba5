"""The moe_cache pool: which experts are in memory, in which slot, and who makes room for whom.

A model whose experts are not all resident keeps some of them in slots of one size and reads the
others when a step needs them. The store knows layers, experts and bytes, and neither files (a
`reader` fills a slot) nor devices (kernels look at its tables and call `ensure`); the memory of the
slots is given to it.

Example:
    store = ExpertStore(ExpertShape(num_layers=2, num_experts=8, top_k=2, slot_bytes=1 << 16), read)
    store.take(np.zeros((8, 1 << 16), np.uint8))
    store.ensure(layer=0, experts=[3, 5], is_long=False)
    store.slots[store.slot_of[0, 3]]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidField
from engine.types import ExpertFigures, PoolInfo, PoolKind

# As in expert_cache.cc.
_HALF_LIFE_TOKENS = 128
_MOST_CLOCK = 1e150
_NOBODY = -1
# Of `ExpertStore.counts`.
LOOKUPS, HITS, LOADS_AHEAD = 0, 1, 2

Bytes = npt.NDArray[np.uint8]
Reader = Callable[[int, int, int, Bytes], None]
Expert = tuple[int, int]
"""A layer among those with experts, and an expert of it."""


@dataclass(frozen=True)
class ExpertShape:
    """What the experts of a model are; `top_k` is how many a token uses per layer.

    An expert is read in `num_parts`, by several threads.
    """

    num_layers: int
    num_experts: int
    top_k: int
    slot_bytes: int
    num_parts: int = 1

    @property
    def floor(self) -> int:
        """The fewest slots that can run a step: one whole layer."""
        return self.num_experts

    @property
    def ceiling(self) -> int:
        """The slots with which every expert is resident."""
        return self.num_layers * self.num_experts

    def pool_info(self, size: int, num_held: int) -> PoolInfo:
        """A pool of `size` slots, some of which hold experts that can make room at any time."""
        return PoolInfo(
            kind=PoolKind.MOE_CACHE,
            size=size,
            free=size - num_held,
            used=0,
            pinned=0,
            cached=num_held,
            floor=self.floor,
            ceiling=self.ceiling,
            unit_bytes=self.slot_bytes,
            unit_tokens=0,
        )

    def checked(self, num_slots: int) -> int:
        """Returns a size that is not refused.

        Raises:
            InvalidField: It is below the floor, or more than there are experts.
        """
        if not self.floor <= num_slots <= self.ceiling:
            raise InvalidField(
                "moe_cache_slots",
                f"must be {self.floor} (one layer's experts) to {self.ceiling} (all of them), "
                f"got {num_slots}",
            )
        return num_slots


class ExpertStore:
    """Slots of experts. `ensure` is called by one step at a time; figures may be read any time."""

    def __init__(
        self,
        shape: ExpertShape,
        reader: Reader,
        *,
        overlaps: bool = True,
        reader_shares: bool = False,
    ) -> None:
        """Makes books without any slot.

        Args:
            shape: What the experts are.
            reader: Called with (layer, expert, part, a slot's bytes), from any thread; fills that
                part of the slot.
            overlaps: Read the next layer's experts ahead while a long step computes, whenever
                there are two layers' worth of slots.
            reader_shares: What a step waits for is read by several threads in `reader` itself.
        """
        self.shape = shape
        lead = (shape.num_layers, shape.num_experts)
        self.slot_of = np.full(lead, _NOBODY, np.int32)
        # A use counts `clock`, which doubles with time: what is compared has decayed.
        self.uses = np.zeros(lead, np.float64)
        self.clock = np.ones(1, np.float64)
        self.counts = np.zeros(3, np.int64)
        self._reader = reader
        self._wants_ahead = overlaps
        self._reader_shares = reader_shares
        self._loads = self._loads_ahead = 0
        self._stall_s = 0.0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="experts")
        self._ahead: Future[None] | None = None
        # Why `ensure` failed last: programs that call it say no more than that they failed.
        self.failure: Exception | None = None
        self.take(np.zeros((0, shape.slot_bytes), np.uint8))

    def take(self, slots: Bytes, held: Sequence[Expert] = ()) -> None:
        """Goes over to other slots, uint8 [n, slot_bytes], the first of which hold `held`.

        What the old ones held is forgotten, how often each expert was used is not. Nothing may be
        read ahead, see `settle`.
        """
        self._set_books(len(slots), held)
        self.slots = slots
        self.overlaps = self._wants_ahead and len(slots) >= 2 * self.shape.num_experts

    def take_all(self) -> None:
        """Every expert is in memory, though in no slot: nothing is asked of the store any more."""
        shape = self.shape
        every = [(i, e) for i in range(shape.num_layers) for e in range(shape.num_experts)]
        self._set_books(shape.ceiling, every)
        self.slots = np.zeros((0, shape.slot_bytes), np.uint8)
        self.overlaps = False

    def _set_books(self, num_slots: int, held: Sequence[Expert]) -> None:
        self.num_slots = num_slots
        self._layer_of = np.full(num_slots, _NOBODY, np.int32)
        # The place of a slot's expert in `uses`, row by row.
        self._name_of = np.full(num_slots, _NOBODY, np.int64)
        self._num_held = np.zeros(self.shape.num_layers, np.int64)
        self._taken_at = np.zeros(num_slots, np.int64)
        self._num_taken = 0
        self._may_have_free = True
        self.slot_of[:] = _NOBODY
        for slot, (layer, expert) in enumerate(held):
            self._hold(slot, layer, expert)

    def most_used(self, count: int) -> list[Expert]:
        """The experts in memory that are missed most, at most `count`, the most used first.

        Of equally used ones those of all layers take turns.
        """
        layers, experts = np.nonzero(self.slot_of != _NOBODY)
        order = np.lexsort((layers, experts, -self.uses[layers, experts]))[:count]
        return list(zip(layers[order].tolist(), experts[order].tolist(), strict=True))

    def settle(self) -> None:
        """Waits for what is being read ahead; what failed will be read when a step needs it."""
        ahead, self._ahead = self._ahead, None
        self.counts[LOADS_AHEAD] = 0
        if ahead is not None:
            wait([ahead])

    @property
    def figures(self) -> ExpertFigures:
        """What happened so far."""
        lookups, hits, _ = self.counts.tolist()
        return ExpertFigures(
            lookups, hits, self._loads, self._loads_ahead, self._stall_s, self.overlaps
        )

    def pool_info(self) -> PoolInfo:
        """The pool as lists show it."""
        return self.shape.pool_info(self.num_slots, self.used)

    @property
    def used(self) -> int:
        """Slots that hold an expert."""
        return int((self._layer_of != _NOBODY).sum())

    def read(self, layer: int, expert: int, target: Bytes) -> None:
        """Reads an expert to anywhere; raises as `ensure`."""
        for part in range(self.shape.num_parts):
            self._reader(layer, expert, part, target)

    def close(self) -> None:
        """Ends what is being read ahead."""
        self._threads.shutdown(cancel_futures=True)

    def ensure(self, layer: int, experts: Sequence[int], *, is_long: bool) -> None:
        """Brings all experts that a layer of a step needs into slots.

        Nothing of theirs is taken away before the next call. After a long step's layer the next
        one's experts are read while this one computes.

        Raises:
            OSError: The file cannot be read.
            ModelFileError: It is not what it was when it was opened.
        """
        try:
            self._ensure(layer, experts, is_long=is_long)
        except Exception as error:
            self.failure = error
            raise

    def _ensure(self, layer: int, experts: Sequence[int], *, is_long: bool) -> None:
        started = time.perf_counter()
        self.settle()
        missing = [e for e in experts if self.slot_of[layer, e] < 0]
        self.counts[LOOKUPS] += len(experts)
        self.counts[HITS] += len(experts) - len(missing)
        if missing:
            self._load(layer, missing, experts)
            self._loads += len(missing)
            self._stall_s += time.perf_counter() - started
        if is_long and self.overlaps and layer + 1 < self.shape.num_layers:
            self.counts[LOADS_AHEAD] = 1
            self._ahead = self._threads.submit(self._load_ahead, layer + 1, tuple(experts))

    def count_uses(self, layer: int, ids: npt.NDArray[np.int32]) -> None:
        """Notes what a step's layer uses, int32 [N, K]; native kernels note it themselves."""
        if layer == 0:
            self.clock *= 2.0 ** (len(ids) / _HALF_LIFE_TOKENS)
            if self.clock[0] > _MOST_CLOCK:
                self.uses /= self.clock
                self.clock[0] = 1.0
        np.add.at(self.uses[layer], ids.ravel(), self.clock[0])

    def _load_ahead(self, layer: int, running: Sequence[int]) -> None:
        """Reads what a layer lacks while the layer before it computes with `running`."""
        missing = np.flatnonzero(self.slot_of[layer] < 0)
        busiest = missing[np.argsort(-self.uses[layer, missing], kind="stable")].tolist()
        kept = [(layer - 1, e) for e in running]
        for expert in busiest:
            own = np.flatnonzero(self.slot_of[layer] >= 0).tolist()
            slot = self._make_room(layer, [*kept, *((layer, e) for e in own)])
            self._fill(layer, [(expert, slot)], is_shared=False)
            self._loads_ahead += 1

    def _load(self, layer: int, missing: Sequence[int], needed: Sequence[int]) -> None:
        kept = [(layer, expert) for expert in needed]
        self._fill(
            layer,
            [(expert, self._make_room(layer, kept)) for expert in missing],
            is_shared=not self._reader_shares,
        )

    def _fill(self, layer: int, wanted: Sequence[tuple[int, int]], *, is_shared: bool) -> None:
        """Reads experts into slots; a second thread helps if the work `is_shared`."""
        parts = range(self.shape.num_parts)
        # Two threads may take from one iterator of a list.
        work = iter([(expert, slot, part) for expert, slot in wanted for part in parts])
        helper = None
        if is_shared and len(wanted) > 1:  # for one, waking another thread costs what it saves
            helper = self._threads.submit(self._read_all, layer, work)
        try:
            try:
                self._read_all(layer, work)
            finally:
                if helper is not None:
                    helper.result()
        except BaseException:
            for _, slot in wanted:
                self._taken_at[slot] = 0  # it is free again
            self._may_have_free = True
            raise
        for expert, slot in wanted:
            self._hold(slot, layer, expert)

    def _read_all(self, layer: int, work: Iterator[tuple[int, int, int]]) -> None:
        for expert, slot, part in work:
            self._reader(layer, expert, part, self.slots[slot])

    def _hold(self, slot: int, layer: int, expert: int) -> None:
        self._layer_of[slot] = layer
        self._name_of[slot] = layer * self.shape.num_experts + expert
        self._num_held[layer] += 1
        self.slot_of[layer, expert] = slot

    def _make_room(self, layer: int, kept: Sequence[Expert]) -> int:
        """Takes a slot: a free one, else that of the expert which is missed least.

        Other layers keep a few experts, unless only that makes the step possible.
        """
        self._num_taken += 1
        if self._may_have_free:
            free = np.flatnonzero((self._layer_of == _NOBODY) & (self._taken_at == 0))
            if free.size:
                slot = int(free[0])
                self._taken_at[slot] = self._num_taken
                return slot
            self._may_have_free = False
        slot = self._least_missed(layer, kept)
        name, self._name_of[slot] = int(self._name_of[slot]), _NOBODY
        self.slot_of.reshape(-1)[name] = _NOBODY
        self._num_held[self._layer_of[slot]] -= 1
        self._layer_of[slot] = _NOBODY
        self._taken_at[slot] = self._num_taken
        return slot

    def _least_missed(self, layer: int, kept: Sequence[Expert]) -> int:
        """The fewer calls of numpy the better: a step waits, and each finds its data cold."""
        shape = self.shape
        uses = self.uses.reshape(-1)[self._name_of]
        if self._num_held.sum() < self.num_slots:  # some are being filled just now
            uses[self._layer_of == _NOBODY] = np.inf
        uses[[slot for i, e in kept if (slot := self.slot_of.item(i, e)) >= 0]] = np.inf
        is_poor = self._num_held <= min(shape.top_k, self.num_slots // shape.num_layers)
        is_poor[layer] = False
        polite = np.where(is_poor[self._layer_of], np.inf, uses) if is_poor.any() else uses
        slot = int(polite.argmin())
        if polite[slot] == np.inf:
            polite, slot = uses, int(uses.argmin())
        # The least used, of those the longest held.
        is_same = polite == polite[slot]
        if np.count_nonzero(is_same) > 1:
            same = np.flatnonzero(is_same)
            slot = int(same[self._taken_at[same].argmin()])
        return slot
