"""Saving and restoring slots: what the engine thread does of it, between steps.

File work runs on other threads and asks for pages through `EngineCalls`. Until a restore is
committed its pages are a `Holding` that no slot and no prefix refers to, so that a refusal gives
them back and leaves everything as it was. Knows no path, no hash and no thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.adapters.effective import split_key
from engine.errors import (
    EngineError,
    KvPagesExhausted,
    NotSupported,
    SlotBusy,
    SlotContentNotFound,
)
from engine.memory.checkpoint import Checkpoint
from engine.memory.planner import pages_for
from engine.memory.prefix_index import PrefixRoot
from engine.scheduling.room import Room
from engine.scheduling.wishes import (
    Restore,
    RestoredSlot,
    Save,
    SavedSlot,
    fail,
    is_wanted,
)
from engine.slots.engine_calls import EngineCalls
from engine.slots.file_work import (
    Gathered,
    SaveOrder,
    TransferStopped,
    restore,
    save,
)
from engine.slots.manifest import AdapterMark, Manifest
from engine.slots.reader import VerifiedSlot
from engine.slots.state_layout import Piece, WindowMark
from engine.slots.table import Holding, Slot, SlotTable
from engine.slots.window import WindowHeld
from engine.step import PageContent, PageStore, PoolLost
from engine.types import PoolKind, SlotState

# Cut-back points of sliding-window layers that a file keeps beside the end of its sequence.
_MAX_OLDER_MARKS = 2


class ContentLost(RuntimeError):
    """The device lost the pages while they were saved or restored."""


@dataclass(frozen=True)
class TransferParts:
    """What transfers are given.

    `calls` reaches the engine thread, `start` runs file work on another. `root_of` is what the
    prefixes of a tenant begin with under a set of adapters. `on_pool_lost` is told when a write
    took the pools with it.
    """

    store: PageStore
    calls: EngineCalls
    start: Callable[[Callable[[], None]], None]
    clock: Callable[[], float]
    as_engine_error: Callable[[Exception], EngineError]
    root_of: Callable[[str, tuple[AdapterMark, ...]], PrefixRoot]
    on_pool_lost: Callable[[], None]


class Transfers:
    """The saves and restores of one slot table."""

    def __init__(self, parts: TransferParts, table: SlotTable, room: Room) -> None:
        self._parts = parts
        self._table = table
        self._room = room
        self._waiting: list[Save | Restore] = []
        self._running: set[Save | Restore] = set()

    @property
    def num_waiting(self) -> int:
        """Transfers whose slot is in use."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Transfers that other threads work on."""
        return len(self._running)

    def add(self, transfer: Save | Restore) -> None:
        """Queues a transfer, or fails it at once if its slot is busy and it may not wait."""
        slot = self._table.slot(transfer.slot_id)
        if self._table.states is not None:
            fail(transfer, _without_states())
            return
        if slot.is_idle or not transfer.fail_if_busy:
            self._waiting.append(transfer)
            return
        fail(transfer, busy(slot))

    def run(self) -> None:
        """Starts the transfers whose slots are idle now."""
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            slot = self._table.slot(transfer.slot_id)
            if transfer.done.cancelled():
                continue
            if not slot.is_idle:
                self._waiting.append(transfer)
            elif isinstance(transfer, Save):
                self._save(slot, transfer)
            else:
                self._restore(slot, transfer)

    def refuse_waiting(self, make_error: Callable[[], Exception]) -> None:
        """Fails those that wait, but for the saves that a stop is to make."""
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            if isinstance(transfer, Save) and transfer.outlives_stop:
                self._waiting.append(transfer)
            else:
                fail(transfer, make_error())

    def stop_all(self, make_error: Callable[[], Exception]) -> None:
        """Fails all of them; those that other threads work on end at their next piece."""
        waiting, self._waiting = self._waiting, []
        for transfer in (*waiting, *self._running):
            fail(transfer, make_error())

    # Saving.

    def _save(self, slot: Slot, save_: Save) -> None:
        if slot.tokens and save_.tenant not in (None, slot.tenant):
            fail(save_, SlotContentNotFound(slot.slot_id))
            return
        self.begin_save(slot, save_)

    def begin_save(
        self, slot: Slot, save_: Save, then: Callable[[bool], None] | None = None
    ) -> None:
        """Starts to save an idle slot; `then` is told, on the engine thread, whether it is done."""
        if self._table.states is not None:
            fail(save_, _without_states())
            if then is not None:
                then(False)
            return
        windows = _SavedWindows.of(slot, self._table)
        manifest = _manifest(slot, save_.order, windows.marks)
        reading = _Reading(self._parts.store, self._table, slot, windows, len(slot.tokens))
        # Older windows may be given up for running rows at any time: these are copied now.
        early = {p: reading.gather(p) for p in manifest.pieces if reading.is_borrowed(p)}
        slot.state = SlotState.TRANSFER
        self._running.add(save_)
        calls, tokens = self._parts.calls, tuple(slot.tokens)

        def gather(piece: Piece) -> Future[Gathered]:
            if piece in early:
                ready: Future[Gathered] = Future()
                ready.set_result(early.pop(piece))
                return ready
            return calls.call(partial(reading.gather, piece))

        def work() -> None:
            began_s = self._parts.clock()
            try:
                size = save(save_.order, manifest, tokens, gather, save_.done.done)
            except Exception as error:
                calls.call(partial(self._end_save, slot, save_, error, then))
                return
            elapsed_s = self._parts.clock() - began_s
            saved = SavedSlot(slot.slot_id, len(tokens), size, elapsed_s)
            calls.call(partial(self._end_save, slot, save_, saved, then))

        self._parts.start(work)

    def _end_save(
        self,
        slot: Slot,
        save_: Save,
        outcome: SavedSlot | Exception,
        then: Callable[[bool], None] | None,
    ) -> None:
        self._running.discard(save_)
        slot.state = SlotState.IDLE
        if then is not None:
            then(isinstance(outcome, SavedSlot))
        if isinstance(outcome, SavedSlot):
            if is_wanted(save_):
                save_.done.set_result(outcome)
        elif not isinstance(outcome, TransferStopped):
            fail(save_, self._parts.as_engine_error(outcome))

    # Restoring.

    def _restore(self, slot: Slot, wish: Restore) -> None:
        slot.state = SlotState.TRANSFER
        self._running.add(wish)
        target = _Target(self._parts, self._table, self._room, slot)
        calls = self._parts.calls

        def work() -> None:
            began_s = self._parts.clock()
            try:
                restored = restore(wish.order, target, wish.done.done)
            except Exception as error:
                calls.call(partial(self._refuse, slot, wish, target, error))
                return
            calls.call(partial(self._commit, slot, wish, target, restored, began_s))

        self._parts.start(work)

    def _refuse(self, slot: Slot, wish: Restore, target: _Target, error: Exception) -> None:
        self._running.discard(wish)
        target.give_back()
        slot.state = SlotState.IDLE
        if not isinstance(error, TransferStopped):
            fail(wish, self._parts.as_engine_error(error))

    def _commit(
        self, slot: Slot, wish: Restore, target: _Target, restored: VerifiedSlot, began_s: float
    ) -> None:
        if not is_wanted(wish):
            self._refuse(slot, wish, target, TransferStopped())
            return
        self._running.discard(wish)
        try:
            target.commit(restored)
        except Exception as error:
            target.give_back()
            wish.done.set_exception(self._parts.as_engine_error(error))
            return
        finally:
            slot.state = SlotState.IDLE
        wish.done.set_result(
            RestoredSlot(
                slot.slot_id,
                len(restored.tokens),
                restored.size_bytes,
                self._parts.clock() - began_s,
                restored.scales,
            )
        )


@dataclass(frozen=True)
class _SavedWindows:
    """Where a slot's sliding-window layers can be continued, and in which pages that lies.

    `borrowed` are pages by their place in the sequence that checkpoints hold, and not the slot.
    """

    marks: tuple[WindowMark, ...]
    borrowed: dict[int, int]

    @classmethod
    def of(cls, slot: Slot, table: SlotTable) -> _SavedWindows:
        if table.windows is None or not slot.tokens:
            return cls((), {})
        last = table.windows.checkpoint(slot.window, len(slot.tokens))
        kept = [each for node in slot.nodes for each in node.checkpoints]
        older = sorted((c for c in kept if c.position < last.position), key=lambda c: c.position)
        older = older[-_MAX_OLDER_MARKS:]
        borrowed: dict[int, int] = {}
        for checkpoint in older:
            borrowed |= dict(enumerate(checkpoint.window_pages, checkpoint.first_page))
        for place in range(slot.window.num_behind, len(slot.window.page_ids)):
            borrowed.pop(place, None)
        marks = (WindowMark(each.lowest, each.position) for each in (*older, last))
        return cls(tuple(marks), borrowed)


@dataclass(frozen=True)
class _Reading:
    """Gathers the pages of a slot that stays as it is."""

    store: PageStore
    table: SlotTable
    slot: Slot
    windows: _SavedWindows
    num_tokens: int

    def is_borrowed(self, piece: Piece) -> bool:
        """Whether a piece lies, in part, in pages that the slot does not hold."""
        return piece.kind is PoolKind.SWA and any(
            place in self.windows.borrowed for place in _places(piece, self.table)
        )

    def gather(self, piece: Piece) -> Gathered:
        """Starts to copy the pages of a piece to the host.

        Raises:
            ContentLost: The slot was emptied meanwhile, which only the device's end does.
        """
        if len(self.slot.tokens) != self.num_tokens:
            raise ContentLost("the slot's pages were lost while they were saved")
        places = _places(piece, self.table)
        held = self.slot.pages if piece.kind is PoolKind.KV else self.slot.window.page_ids
        borrowed = self.windows.borrowed if piece.kind is PoolKind.SWA else {}
        page_ids = [borrowed.get(place) or held[place] for place in places]
        reads = [self.store.read_pages(piece.kind, ids) for ids in _portions(page_ids, self.store)]
        return Gathered(reads, piece.span.start - places.start * self.table.page_tokens)


class _Target:
    """Pages for a restored state, which become the slot's in `commit`; see `RestoreTarget`."""

    def __init__(self, parts: TransferParts, table: SlotTable, room: Room, slot: Slot) -> None:
        self._parts = parts
        self._table = table
        self._room = room
        self._slot = slot
        self._holding: Holding | None = None
        self._checkpoints: list[Checkpoint] = []
        self._window_pages: dict[int, int] = {}

    def reserve(self, slot: VerifiedSlot, *, may_evict: bool) -> Future[bool]:
        return self._parts.calls.call(partial(self._reserve, slot, may_evict))

    def fill(self, piece: Piece, content: PageContent) -> Future[None]:
        return self._parts.calls.call(partial(self._fill, piece, content))

    def commit(self, restored: VerifiedSlot) -> None:
        """Gives the slot the restored state in place of its own, and lists it for the others."""
        held, slot, table = self._check(), self._slot, self._table
        older = self._checkpoints[:-1]
        table.truncate(slot, 0)
        if not restored.tokens:
            table.drop(held)
            return
        window = WindowHeld()
        if table.windows is not None:
            table.windows.adopt(window, self._checkpoints[-1], len(restored.tokens))
        table.adopt(
            slot,
            self._parts.root_of(restored.tenant, restored.adapters),
            restored.tokens,
            table.take(held),
            window,
            [Checkpoint(c.position, c.lowest, c.first_page, c.window_pages) for c in older],
            marked_from=restored.moved_from,
        )
        for checkpoint in self._checkpoints:
            checkpoint.drop()
        self._checkpoints = []

    def give_back(self) -> None:
        """Frees what was reserved."""
        held, self._holding = self._holding, None
        if held in self._table.holdings:
            self._table.drop(held)
        for checkpoint in self._checkpoints:
            if checkpoint in self._table.checkpoints:
                checkpoint.drop()
        self._checkpoints = []

    def _reserve(self, restored: VerifiedSlot, may_evict: bool) -> bool:
        num_pages = pages_for(len(restored.tokens), self._table.page_tokens)
        pieces = (piece for piece in restored.pieces if piece.kind is PoolKind.SWA)
        places = sorted({place for piece in pieces for place in _places(piece, self._table)})
        taken = self._room.reserve(num_pages, len(places), self._slot, may_evict=may_evict)
        if taken is None:
            return False
        self._holding = self._table.hold(taken.pages)
        self._hold_windows(restored, dict(zip(places, taken.window_pages, strict=True)))
        return True

    def _hold_windows(self, restored: VerifiedSlot, page_ids: dict[int, int]) -> None:
        """Window pages are held by checkpoints: running rows come first and may take them."""
        windows, page_tokens = self._table.windows, self._table.page_tokens
        if windows is None:
            return
        self._window_pages = page_ids
        for mark in restored.marks:
            span = mark.span(windows.policy.window)
            first, end = span.start // page_tokens, pages_for(span.end, page_tokens)
            checkpoint = Checkpoint(
                position=mark.position,
                lowest=mark.lowest,
                first_page=first,
                window_pages=tuple(self._window_pages[place] for place in range(first, end)),
            )
            self._table.checkpoints.add(checkpoint)
            self._checkpoints.append(checkpoint)
        windows.pages.release(list(page_ids.values()))

    def _fill(self, piece: Piece, content: PageContent) -> None:
        held, page_tokens = self._check(), self._table.page_tokens
        places = _places(piece, self._table)
        if piece.kind is PoolKind.KV:
            page_ids = held.pages[places.start : places.stop]
        else:
            page_ids = [self._window_pages[place] for place in places]
        content = _padded(content, piece.span.start - places.start * page_tokens)
        store = self._parts.store
        for index, ids in enumerate(_portions(page_ids, store)):
            start = index * store.transfer_pages * page_tokens
            part = slice(start, start + len(ids) * page_tokens)
            try:
                store.write_pages(
                    piece.kind, ids, PageContent(content.keys[:, part], content.values[:, part])
                )
            except PoolLost:
                self._parts.on_pool_lost()
                raise

    def _check(self) -> Holding:
        """Returns the holding, which must still be whole.

        Raises:
            ContentLost: The device lost it.
            KvPagesExhausted: Running rows needed its window pages.
        """
        held = self._holding
        if held is None or held not in self._table.holdings:
            raise ContentLost("the reserved pages were lost while the slot was restored")
        if any(checkpoint not in self._table.checkpoints for checkpoint in self._checkpoints):
            raise KvPagesExhausted(len(self._window_pages), 0)
        return held


def _without_states() -> NotSupported:
    """Without its state a sequence would go on from nothing, and slot files do not hold it."""
    return NotSupported("slot files of models with recurrent layers")


def busy(slot: Slot) -> SlotBusy:
    """The refusal of whoever does not want to wait for a slot."""
    return SlotBusy(slot.slot_id, slot.request.request_id if slot.request else "")


def _manifest(slot: Slot, order: SaveOrder, marks: tuple[WindowMark, ...]) -> Manifest:
    return Manifest(
        fingerprint=order.fingerprint,
        traits=order.traits,
        adapters=_marks(slot),
        model_name=order.model_name,
        tenant=slot.tenant,
        num_tokens=len(slot.tokens),
        marks=marks,
        moved_from=slot.marked_from,
        digests={},
    )


def _marks(slot: Slot) -> tuple[AdapterMark, ...]:
    members = split_key(slot.root.adapters) if slot.root else ()
    return tuple(AdapterMark(digest.hex(), scale) for digest, scale in members)


def _places(piece: Piece, table: SlotTable) -> range:
    """The pages of a sequence, by their place in it, that a piece lies in."""
    page_tokens = table.page_tokens
    return range(piece.span.start // page_tokens, pages_for(piece.span.end, page_tokens))


def _portions(page_ids: Sequence[int], store: PageStore) -> list[Sequence[int]]:
    size = store.transfer_pages
    return [page_ids[start : start + size] for start in range(0, len(page_ids), size)]


def _padded(content: PageContent, num_before: int) -> PageContent:
    """Content that begins inside a page, with zeros before it: nobody may look there."""
    if not num_before:
        return content
    widths = ((0, 0), (num_before, 0), (0, 0), (0, 0))
    return PageContent(np.pad(content.keys, widths), np.pad(content.values, widths))
