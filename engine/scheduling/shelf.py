"""What a slot held before a prompt is computed in it that may not stay there.

A prompt that is computed only to be saved becomes the slot's state once the file is in place; until
then the old state is kept here, and goes back if that fails. Its kv pages are a `Holding`, its
window or its recurrent state a checkpoint. Pages can be given up for running rows like everything
that is idle; a state stays, since nobody needs one to run.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.checkpoint import Checkpoint
from engine.memory.prefix_index import PrefixRoot
from engine.requests import Request
from engine.slots.states import RecurrentStates
from engine.slots.table import Holding, Slot, SlotTable
from engine.step import StateStore


@dataclass(frozen=True)
class Shelf:
    """One slot's old state."""

    table: SlotTable
    held: Holding
    tokens: tuple[int, ...]
    root: PrefixRoot | None
    marked_from: int | None
    checkpoint: Checkpoint | None
    request: Request | None
    task_id: int

    @classmethod
    def of(cls, slot: Slot, table: SlotTable, store: StateStore) -> Shelf:
        """Keeps what an idle slot holds; the slot still holds it too.

        Raises whatever the device raises; nothing has changed then.
        """
        checkpoint = None
        if table.windows is not None and slot.tokens:
            checkpoint = table.windows.checkpoint(slot.window, len(slot.tokens))
        elif table.states is not None and slot.tokens:
            checkpoint = _copied_state(slot, table.states, store)
        if checkpoint is not None:
            table.checkpoints.add(checkpoint)
        return cls(
            table=table,
            held=table.hold(slot.pages, shared=True),
            tokens=tuple(slot.tokens),
            root=slot.root,
            marked_from=slot.marked_from,
            checkpoint=checkpoint,
            request=slot.request,
            task_id=slot.task_id,
        )

    def drop(self) -> None:
        """Gives the old state up."""
        self.table.drop(self.held)
        if self.checkpoint is not None and self.checkpoint in self.table.checkpoints:
            self.checkpoint.drop()

    def put_back(self, slot: Slot) -> None:
        """Makes the slot what it was, or empty if its pages had to be given up meanwhile."""
        table = self.table
        table.truncate(slot, 0)
        slot.request, slot.task_id = self.request, self.task_id
        is_whole = self.held in table.holdings
        if (table.windows or table.states) and self.tokens:
            is_whole = is_whole and self.checkpoint in table.checkpoints
        if is_whole:
            slot.tokens[:] = self.tokens
            slot.pages[:] = table.take(self.held)
            slot.root = self.root
            slot.marked_from = self.marked_from
            if table.windows is not None and self.checkpoint is not None:
                table.windows.adopt(slot.window, self.checkpoint, len(self.tokens))
            if table.states is not None and self.checkpoint is not None:
                _swap(slot, table.states, self.checkpoint)
            table.register(slot)
        self.drop()


def _copied_state(slot: Slot, states: RecurrentStates, store: StateStore) -> Checkpoint | None:
    """Gives the slot a copy of its state to work on and keeps the old one; None without room."""
    copy = states.take()
    if copy is None:
        return None
    checkpoint = Checkpoint(len(slot.tokens), lowest=len(slot.tokens), state_id=copy)
    try:
        store.copy_state(slot.state_id, copy)
    except BaseException:
        states.give_back(copy)
        raise
    _swap(slot, states, checkpoint)
    return checkpoint


def _swap(slot: Slot, states: RecurrentStates, checkpoint: Checkpoint) -> None:
    """Exchanges the states of a slot and of a checkpoint, which takes no work of the device."""
    given = checkpoint.state_id
    checkpoint.state_id = states.swap(slot.slot_id, given)
    slot.state_id = given
