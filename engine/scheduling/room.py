"""Making room in the KV pool: what a request may reserve and what is evicted for it.

Evicts idle slots only; pre-empting a running row is the scheduler's decision.
"""

from __future__ import annotations

from engine.failpoints import Failpoints, Site
from engine.memory.pages import PageAllocator
from engine.memory.planner import pages_for
from engine.scheduling.row import Row
from engine.slots.table import Slot, SlotTable
from engine.types import Request


class Room:
    """Pages for the slots of one table, taken from its pool."""

    def __init__(self, table: SlotTable, pages: PageAllocator, failpoints: Failpoints) -> None:
        self._table = table
        self._pages = pages
        self._failpoints = failpoints
        self.num_evicted = 0

    def admission_tokens(self, request: Request, num_tokens: int) -> int:
        """Returns how many tokens to reserve for a sequence that has `num_tokens` now.

        Its tokens and one page more, but never more than its context, its budget or the pool hold.
        """
        table = self._table
        want = num_tokens + table.page_tokens
        want = min(want, table.context_tokens, self._pages.size * table.page_tokens)
        if request.max_tokens is not None:
            # The last sampled token is never evaluated, and at least one is always sampled.
            want = min(want, len(request.prompt) + max(1, request.max_tokens) - 1)
        return max(want, num_tokens)

    def fits(self, slot: Slot, *, keep: int, num_tokens: int) -> bool:
        """Returns whether an idle slot, cut to its first `keep` tokens, can get `num_tokens`.

        False means that running rows hold too many pages; nothing is changed either way.
        """
        kept = pages_for(keep, self._table.page_tokens)
        needed = pages_for(num_tokens, self._table.page_tokens)
        given_back = len(slot.pages) - kept
        others = self._pages.num_free + self._table.idle_pages(besides=slot)
        return needed - kept <= others + given_back

    def admit(self, slot: Slot, *, keep: int, num_tokens: int) -> None:
        """Cuts an idle slot to its first `keep` tokens and gives it pages for `num_tokens`.

        Idle slots, the least recently used first, lose theirs as far as that takes.
        """
        if self._failpoints.fires(Site.EVICT):
            self._evict_one(besides=slot)
        self._table.truncate(slot, keep)
        self._grow(slot, num_tokens)

    def extend(self, row: Row) -> bool:
        """Gives a running row the pages for its next token.

        Returns False, with nothing changed, if running rows hold all the others.
        """
        slot = row.home
        num_tokens = len(slot.tokens) + 1
        missing = self._table.pages_to_grow(slot, num_tokens)
        if missing > self._pages.num_free + self._table.idle_pages():
            return False
        self._grow(slot, num_tokens)
        return True

    def is_short(self, row: Row) -> bool:
        """Returns whether the row's next token needs a page that its slot does not have."""
        return self._table.pages_to_grow(row.home, len(row.home.tokens) + 1) > 0

    def _grow(self, slot: Slot, num_tokens: int) -> None:
        while self._table.pages_to_grow(slot, num_tokens) > self._pages.num_free:
            if not self._evict_one(besides=slot):
                break
        self._table.grow(slot, num_tokens)

    def _evict_one(self, *, besides: Slot) -> bool:
        evicted = self._table.evict_one(besides=besides)
        self.num_evicted += evicted
        return evicted
