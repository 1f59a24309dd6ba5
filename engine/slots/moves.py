"""Moving tokens within a slot: what is left out is closed up, and what follows is marked.

Pages that others read are never written: the moved tokens go to fresh ones there. Knows no request
and no policy of when to move.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.memory.pages import PageAllocator
from engine.memory.planner import pages_for
from engine.slots.table import Slot, SlotTable, common_prefix
from engine.step import PageStore
from engine.types import PoolKind


def moved_chunks(
    held: Sequence[int], prompt: Sequence[int], *, start: int, least: int
) -> list[int]:
    """Returns the positions in `held` of the tokens that continue the first `start` of `prompt`.

    Runs of at least `least` equal tokens are taken in order; what lies between them in `held` is
    passed over, token by token.

    Source: server_context::update_slots, n_cache_reuse (contract 5.2).
    """
    held, prompt = list(held), list(prompt)
    found: list[int] = []
    at = to = start
    while at + least <= len(held) and to + least <= len(prompt):
        if held[at : at + least] != prompt[to : to + least]:
            at += 1
            continue
        run = common_prefix(held[at:], prompt[to:])
        found += range(at, at + run)
        at, to = at + run, to + run
    return found


class SlotMoves:
    """Moves tokens of slots on the device."""

    def __init__(self, table: SlotTable, pages: PageAllocator, store: PageStore) -> None:
        self._table = table
        self._pages = pages
        self._store = store

    def num_fresh(self, slot: Slot, first: int, count: int) -> int:
        """Returns how many fresh pages it takes to move `count` tokens to `first` and on."""
        return len(self._shared(slot, first, count))

    def move(self, slot: Slot, first: int, sources: Sequence[int]) -> None:
        """Keeps the first `first` tokens and continues them with those at `sources`, which rise.

        Raises whatever the device raises; the slot may hold anything then and must be discarded.
        """
        old = list(slot.pages)
        new = old[: pages_for(first + len(sources), self._table.page_tokens)]
        replaced = self._shared(slot, first, len(sources))
        fresh = self._pages.allocate(len(replaced))
        for index, page_id in zip(replaced, fresh, strict=True):
            new[index] = page_id
        try:
            head = first // self._table.page_tokens
            if first % self._table.page_tokens and head in replaced:
                self._store.copy_pages(PoolKind.KV, [old[head]], [new[head]])
            self._store.move_tokens(old, new, first, sources)
        except BaseException:
            self._pages.release(fresh)
            raise
        self._pages.release([*(old[index] for index in replaced), *old[len(new) :]])
        slot.pages = new
        slot.tokens[first:] = [slot.tokens[at] for at in sources]
        del slot.nodes[head:]
        slot.mark(first)

    def _shared(self, slot: Slot, first: int, count: int) -> list[int]:
        """The pages, by their place in the slot, that are to be written and that others hold."""
        page_tokens = self._table.page_tokens
        written = range(first // page_tokens, pages_for(first + count, page_tokens))
        return [i for i in written if self._pages.num_holders(slot.pages[i]) > 1]
