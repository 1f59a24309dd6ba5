"""What slots and the prefix index hold, across a change of the pools' sizes.

First as much is let go as the new sizes need, least recently used first; the rest is copied to host
memory, gets new ids (its order, from 1 on) and is written back. Ids that end where the pool is
smaller can thus never be used again. Called between steps, when no row runs and nothing is on its
way to or from the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.memory.checkpoint import Checkpoint
from engine.memory.pages import SINK_PAGE, PageAllocator, PoolCorruption
from engine.slots.table import Slot, SlotTable
from engine.step import DeviceSizes, DeviceStore, PageContent, StateContent
from engine.types import PoolKind


@dataclass(frozen=True)
class HeldState:
    """What is held: tokens of prefixes, the slots' own included, slots with any, and snapshots.

    `experts` are those in memory, of which a table knows nothing.
    """

    prefix_tokens: int = 0
    slot_ids: tuple[int, ...] = ()
    snapshots: int = 0
    experts: int = 0

    @classmethod
    def of(cls, table: SlotTable) -> HeldState:
        """Counts what a table and its index hold now, the host's pages included."""
        own = sum(unlisted_tokens(slot) for slot in table.slots)
        return cls(
            prefix_tokens=table.index.num_tokens + own,
            slot_ids=tuple(slot.slot_id for slot in table.slots if slot.tokens),
            snapshots=table.states.num_snapshots if table.states else 0,
        )

    def without(self, kept: HeldState) -> HeldState:
        """Returns what of this is not in `kept`."""
        return HeldState(
            prefix_tokens=self.prefix_tokens - kept.prefix_tokens,
            slot_ids=tuple(each for each in self.slot_ids if each not in kept.slot_ids),
            snapshots=self.snapshots - kept.snapshots,
            experts=self.experts - kept.experts,
        )


def unlisted_tokens(slot: Slot) -> int:
    """Returns the tokens of a slot that the prefix index does not list."""
    return max(0, len(slot.tokens) - sum(node.num_tokens for node in slot.nodes))


def let_go(table: SlotTable, pages: PageAllocator, sizes: DeviceSizes) -> None:
    """Evicts cached prefixes, then idle slots, then snapshots, until all else fits.

    Raises whatever the device raises while a prefix is moved to the host.
    """
    while (missing := pages.size - pages.num_free - sizes.kv) > 0:
        if not table.index.evict(missing) and not table.evict_one():
            raise PoolCorruption(f"{missing} kv pages are held that nothing idle holds")
    windows, states = table.windows, table.states
    while windows and (excess := windows.pages.size - sizes.swa) > windows.num_free:
        windows.reclaim(excess)
        if windows.num_free < excess and not table.evict_one():
            raise PoolCorruption(f"{excess} window pages are held that nothing idle holds")
    while states and states.size - states.num_free > sizes.mamba:
        if not states.checkpoints.drop_oldest_state():
            raise PoolCorruption("states are held that are no snapshots")


@dataclass(frozen=True)
class Touched:
    """What a change of sizes replaces; all else stays where it is, unread."""

    pages: bool
    states: bool

    @classmethod
    def of(cls, now: DeviceSizes, then: DeviceSizes) -> Touched:
        """Compares sizes."""
        return cls(now.changes_pages(then), now.changes_states(then))


def renumber(table: SlotTable, pages: PageAllocator, sizes: DeviceSizes, touched: Touched) -> None:
    """Gives the books other sizes; what is held keeps its order and has the ids from 1 on."""
    checkpoints = table.checkpoints.all()
    if touched.pages:
        _renumber_pages(table, pages, sizes.kv)
        if table.windows:
            _renumber_windows(table, checkpoints, table.windows.pages.resize(sizes.swa))
    if touched.states and table.states:
        ids = table.states.resize(sizes.mamba)
        for slot in table.slots:
            slot.state_id = ids[slot.state_id]
        for checkpoint in checkpoints:
            checkpoint.state_id = ids.get(checkpoint.state_id, 0)


def _renumber_pages(table: SlotTable, pages: PageAllocator, size: int) -> None:
    ids = pages.resize(size)
    for holding in (*table.slots, *table.holdings):
        holding.pages[:] = [ids[page_id] for page_id in holding.pages]
    table.index.renumber(ids)


def _renumber_windows(
    table: SlotTable, checkpoints: list[Checkpoint], ids: Mapping[int, int]
) -> None:
    for slot in table.slots:
        slot.window.page_ids[:] = [ids.get(page_id, SINK_PAGE) for page_id in slot.window.page_ids]
    for checkpoint in checkpoints:
        checkpoint.window_pages = tuple(ids[page_id] for page_id in checkpoint.window_pages)


class Copies:
    """Everything that is held of what a change touches, in host memory, in the order of its ids."""

    def __init__(
        self, pages: Mapping[PoolKind, list[PageContent]], states: list[StateContent | None]
    ) -> None:
        self._pages = pages
        self._states = states

    @classmethod
    def read(
        cls, table: SlotTable, pages: PageAllocator, runner: DeviceStore, touched: Touched
    ) -> Copies:
        """Copies what is held; raises whatever the device raises."""
        held: dict[PoolKind, list[int]] = {}
        if touched.pages:
            held[PoolKind.KV] = pages.held_ids()
        if touched.pages and table.windows:
            held[PoolKind.SWA] = table.windows.pages.held_ids()
        copied = {kind: _read_pages(runner, kind, ids) for kind, ids in held.items()}
        states: list[StateContent | None] = []
        if touched.states and table.states:
            # The state of a slot without tokens is nothing, and may never have been written.
            filled = {slot.state_id for slot in table.slots if slot.tokens}
            filled.update(table.checkpoints.held_states())
            states = [
                runner.read_state(each).wait() if each in filled else None
                for each in table.states.held_ids()
            ]
        return cls(copied, states)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        pieces = (piece for pieces in self._pages.values() for piece in pieces)
        total = sum(piece.keys.nbytes + piece.values.nbytes for piece in pieces)
        for state in self._states:
            if state is not None:
                total += state.conv.nbytes + (0 if state.matrix is None else state.matrix.nbytes)
        return total

    def write(self, runner: DeviceStore) -> None:
        """Writes everything under the ids that `renumber` gave; raises as the device does."""
        for kind, pieces in self._pages.items():
            next_id, page_tokens = 1, runner.page_layout(kind).page_tokens
            for piece in pieces:
                end = next_id + piece.num_tokens // page_tokens
                runner.write_pages(kind, range(next_id, end), piece)
                next_id = end
        for state_id, state in enumerate(self._states, 1):
            if state is not None:
                runner.write_state(state_id, state)


def _read_pages(runner: DeviceStore, kind: PoolKind, page_ids: list[int]) -> list[PageContent]:
    step = runner.transfer_pages
    pieces = (page_ids[first : first + step] for first in range(0, len(page_ids), step))
    return [runner.read_pages(kind, piece).wait() for piece in pieces]
