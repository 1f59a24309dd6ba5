"""What a slot held before a prompt is computed in it that may not stay there.

A prompt that is computed only to be saved becomes the slot's state once the file is in place; until
then the old state is kept here, and goes back if that fails. Its kv pages are a `Holding`, its
window a checkpoint, so that both can be given up for running rows like everything that is idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.checkpoint import Checkpoint
from engine.memory.prefix_index import PrefixRoot
from engine.slots.table import Holding, Slot, SlotTable
from engine.types import Request


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
    def of(cls, slot: Slot, table: SlotTable) -> Shelf:
        """Keeps what an idle slot holds; the slot still holds it too."""
        checkpoint = None
        if table.windows is not None and slot.tokens:
            checkpoint = table.windows.checkpoint(slot.window, len(slot.tokens))
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
        # A recurrent state was written over; its snapshots are still listed.
        is_whole = self.held in table.holdings and table.states is None
        if table.windows is not None and self.tokens:
            is_whole = is_whole and self.checkpoint in table.checkpoints
        if is_whole:
            slot.tokens[:] = self.tokens
            slot.pages[:] = table.take(self.held)
            slot.root = self.root
            slot.marked_from = self.marked_from
            if table.windows is not None and self.checkpoint is not None:
                table.windows.adopt(slot.window, self.checkpoint, len(self.tokens))
            table.register(slot)
        self.drop()
