"""Reading an idle slot's state off the device, piece by piece, for a save.

Knows slots, pages and states; what becomes of the pieces, and any file, is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.planner import pages_for
from engine.slots.file_work import Gathered, GatheredPages
from engine.slots.state_layout import Mark, PagePiece, Piece, StatePiece
from engine.slots.table import Slot, SlotTable
from engine.step import DeviceStore, PageStore
from engine.types import PoolKind

# Cut-back points that a file keeps beside the end of its sequence, the newest ones: a pool of
# states has room for as many snapshots for each slot unless it is told otherwise.
_MAX_OLDER_MARKS = 2


class ContentLost(RuntimeError):
    """The device lost what was saved or restored meanwhile."""


@dataclass(frozen=True)
class KeptMarks:
    """Where a slot can be continued besides the end of its pages, and what that takes.

    `borrowed` are window pages by their place in the sequence that checkpoints hold, and not the
    slot. `states` are states by position, the slot's own at its end among them.
    """

    marks: tuple[Mark, ...] = ()
    borrowed: dict[int, int] | None = None
    states: dict[int, int] | None = None

    @classmethod
    def of(cls, slot: Slot, table: SlotTable) -> KeptMarks:
        """Looks at what an idle slot, and checkpoints of its sequence, hold now."""
        if not slot.tokens:
            return cls()
        if table.windows is not None:
            return cls._of_windows(slot, table)
        return cls._of_states(slot, table) if table.states is not None else cls()

    @classmethod
    def _of_windows(cls, slot: Slot, table: SlotTable) -> KeptMarks:
        assert table.windows is not None
        last = table.windows.checkpoint(slot.window, len(slot.tokens))
        older = table.checkpoints_of(slot, before=last.position)[-_MAX_OLDER_MARKS:]
        borrowed: dict[int, int] = {}
        for checkpoint in older:
            borrowed |= dict(enumerate(checkpoint.window_pages, checkpoint.first_page))
        for place in range(slot.window.num_behind, len(slot.window.page_ids)):
            borrowed.pop(place, None)
        marks = (Mark(each.lowest, each.position) for each in (*older, last))
        return cls(tuple(marks), borrowed=borrowed)

    @classmethod
    def _of_states(cls, slot: Slot, table: SlotTable) -> KeptMarks:
        end = len(slot.tokens)
        older = table.checkpoints_of(slot, before=end)[-_MAX_OLDER_MARKS:]
        states = {each.position: each.state_id for each in older} | {end: slot.state_id}
        return cls(tuple(Mark(position, position) for position in states), states=states)


@dataclass(frozen=True)
class Reading:
    """Gathers the pieces of a slot that stays as it is."""

    store: DeviceStore
    table: SlotTable
    slot: Slot
    kept: KeptMarks
    num_tokens: int

    def is_borrowed(self, piece: Piece) -> bool:
        """Whether a piece lies, in part, in what checkpoints hold and not the slot."""
        if isinstance(piece, StatePiece):
            return piece.position < self.num_tokens
        borrowed = self.kept.borrowed or {}
        places = places_of(piece, self.table)
        return piece.kind is PoolKind.SWA and any(place in borrowed for place in places)

    def gather(self, piece: Piece) -> Gathered:
        """Starts to copy a piece to the host.

        Raises:
            ContentLost: The slot was emptied meanwhile, which only the device's end does.
        """
        if len(self.slot.tokens) != self.num_tokens:
            raise ContentLost("the slot's state was lost while it was saved")
        if isinstance(piece, StatePiece):
            assert self.kept.states is not None
            return self.store.read_state(self.kept.states[piece.position])
        places = places_of(piece, self.table)
        held = self.slot.pages if piece.kind is PoolKind.KV else self.slot.window.page_ids
        borrowed = (self.kept.borrowed or {}) if piece.kind is PoolKind.SWA else {}
        page_ids = [borrowed.get(place) or held[place] for place in places]
        reads = [self.store.read_pages(piece.kind, ids) for ids in portions(page_ids, self.store)]
        skip = piece.span.start - places.start * self.table.page_tokens
        return GatheredPages(reads, skip, piece.span.num_tokens)


def places_of(piece: PagePiece, table: SlotTable) -> range:
    """Returns the pages of a sequence, by their place in it, that a piece lies in."""
    page_tokens = table.page_tokens
    return range(piece.span.start // page_tokens, pages_for(piece.span.end, page_tokens))


def portions(page_ids: Sequence[int], store: PageStore) -> list[Sequence[int]]:
    """Cuts a list of pages into as many as are read or written at a time."""
    size = store.transfer_pages
    return [page_ids[start : start + size] for start in range(0, len(page_ids), size)]
