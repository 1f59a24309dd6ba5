"""Erasing a slot, at once or when the request that uses it ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.errors import SlotBusy, SlotContentNotFound
from engine.scheduling.answers import Answers
from engine.slots.table import Slot, SlotTable


@dataclass(frozen=True)
class ErasedSlot:
    """What an erase gave back."""

    slot_id: int
    tokens: int
    pages: int


@dataclass(frozen=True)
class Erasure:
    """A wish to erase. `tenant` None may erase every tenant's content."""

    slot_id: int
    fail_if_busy: bool
    tenant: str | None
    done: Future[ErasedSlot]


class Erasures:
    """The erases that wait for their slots."""

    def __init__(self, table: SlotTable, answers: Answers) -> None:
        self._table = table
        self._answers = answers
        self._waiting: list[Erasure] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, erasure: Erasure) -> None:
        """Queues an erase, or fails it at once if its slot is busy and it may not wait."""
        slot = self._table.slot(erasure.slot_id)
        if slot.is_idle or not erasure.fail_if_busy:
            self._waiting.append(erasure)
        elif erasure.done.set_running_or_notify_cancel():
            name = slot.request.request_id if slot.request else ""
            erasure.done.set_exception(SlotBusy(slot.slot_id, name))

    def run(self) -> None:
        """Erases the slots that are idle now."""
        waiting, self._waiting = self._waiting, []
        for erasure in waiting:
            slot = self._table.slot(erasure.slot_id)
            if erasure.done.cancelled():
                continue
            if not slot.is_idle:
                self._waiting.append(erasure)
            elif erasure.done.set_running_or_notify_cancel():
                self._erase(slot, erasure)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Fails every erase that waits."""
        waiting, self._waiting = self._waiting, []
        for erasure in waiting:
            if erasure.done.set_running_or_notify_cancel():
                erasure.done.set_exception(make_error())

    def _erase(self, slot: Slot, erasure: Erasure) -> None:
        if slot.tokens and erasure.tenant is not None and erasure.tenant != slot.tenant:
            erasure.done.set_exception(SlotContentNotFound(slot.slot_id))
            return
        tokens = len(slot.tokens)
        pages = self._table.erase(slot)
        self._answers.keep(erasure.done, ErasedSlot(slot.slot_id, tokens, pages))
