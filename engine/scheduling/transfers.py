"""Saving and restoring slots: what the engine thread does of it, between steps.

File work runs on other threads and asks for pages through `EngineCalls`. Until a restore is
committed its pages are a `Holding` that no slot and no prefix refers to, so that a refusal gives
them back and leaves everything as it was. Knows no path, no hash and no thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from engine.adapters.effective import split_key
from engine.errors import SlotBusy, SlotContentNotFound
from engine.scheduling.answers import Answers
from engine.scheduling.reading import KeptMarks, Reading
from engine.scheduling.restoring import Target, TransferParts
from engine.scheduling.room import Room
from engine.scheduling.wishes import (
    Restore,
    RestoredSlot,
    Save,
    SavedSlot,
    fail,
    is_wanted,
)
from engine.slots.file_work import (
    Gathered,
    SaveOrder,
    TransferStopped,
    restore,
    save,
)
from engine.slots.manifest import AdapterMark, Manifest
from engine.slots.reader import VerifiedSlot
from engine.slots.state_layout import Mark, Piece
from engine.slots.table import Slot, SlotTable
from engine.types import SlotState


class Transfers:
    """The saves and restores of one slot table."""

    def __init__(
        self, parts: TransferParts, table: SlotTable, room: Room, answers: Answers
    ) -> None:
        self._parts = parts
        self._table = table
        self._room = room
        self._answers = answers
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
        kept = KeptMarks.of(slot, self._table)
        manifest = _manifest(slot, save_.order, kept.marks)
        reading = Reading(self._parts.store, self._table, slot, kept, len(slot.tokens))
        parts = self._parts
        # Older windows and states may be given up for running rows at any time: copied now.
        try:
            borrowed = [piece for piece in manifest.pieces if reading.is_borrowed(piece)]
            early = {p: parts.watched(partial(reading.gather, p)) for p in borrowed}
        except Exception as error:
            self._end_save(slot, save_, error, then)
            return
        slot.state = SlotState.TRANSFER
        self._running.add(save_)
        calls, tokens = self._parts.calls, tuple(slot.tokens)

        def gather(piece: Piece) -> Future[Gathered]:
            if piece in early:
                ready: Future[Gathered] = Future()
                ready.set_result(early.pop(piece))
                return ready
            return parts.call(partial(reading.gather, piece))

        def work() -> None:
            began_s = self._parts.clock()

            def tell(size: int) -> None:
                elapsed_s = self._parts.clock() - began_s
                saved = SavedSlot(slot.slot_id, len(tokens), size, elapsed_s)
                calls.call(partial(self._end_save, slot, save_, saved, then))

            try:
                save(save_.order, manifest, tokens, gather, save_.done.done, tell)
            except Exception as error:
                calls.call(partial(self._end_save, slot, save_, error, then))

        try:
            parts.start(work)
        except Exception as error:
            self._end_save(slot, save_, error, then)

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
                self._answers.keep(save_.done, outcome)
        elif not isinstance(outcome, TransferStopped):
            self._fail(save_, self._parts.as_engine_error(outcome))

    # Restoring.

    def _restore(self, slot: Slot, wish: Restore) -> None:
        slot.state = SlotState.TRANSFER
        self._running.add(wish)
        target = Target(self._parts, self._table, self._room, slot)
        calls = self._parts.calls

        def work() -> None:
            began_s = self._parts.clock()
            try:
                restored = restore(wish.order, target, wish.done.done)
            except Exception as error:
                calls.call(partial(self._refuse, slot, wish, target, error))
                return
            calls.call(partial(self._commit, slot, wish, target, restored, began_s))

        try:
            self._parts.start(work)
        except Exception as error:
            self._refuse(slot, wish, target, error)

    def _refuse(self, slot: Slot, wish: Restore, target: Target, error: Exception) -> None:
        self._running.discard(wish)
        target.give_back()
        slot.state = SlotState.IDLE
        if not isinstance(error, TransferStopped):
            self._fail(wish, self._parts.as_engine_error(error))

    def _commit(
        self, slot: Slot, wish: Restore, target: Target, restored: VerifiedSlot, began_s: float
    ) -> None:
        if not is_wanted(wish):
            self._refuse(slot, wish, target, TransferStopped())
            return
        self._running.discard(wish)
        try:
            self._parts.watched(partial(target.commit, restored))
        except Exception as error:
            target.give_back()
            self._answers.keep_error(wish.done, self._parts.as_engine_error(error))
            return
        finally:
            slot.state = SlotState.IDLE
        done = RestoredSlot(
            slot.slot_id,
            len(restored.tokens),
            restored.size_bytes,
            self._parts.clock() - began_s,
            restored.scales,
        )
        self._answers.keep(wish.done, done)

    def _fail(self, wish: Save | Restore, error: Exception) -> None:
        if is_wanted(wish):
            self._answers.keep_error(wish.done, error)


def busy(slot: Slot) -> SlotBusy:
    """The refusal of whoever does not want to wait for a slot."""
    return SlotBusy(slot.slot_id, slot.request.request_id if slot.request else "")


def _manifest(slot: Slot, order: SaveOrder, marks: tuple[Mark, ...]) -> Manifest:
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
