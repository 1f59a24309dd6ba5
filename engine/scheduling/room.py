"""Making room in the KV pool: what a request may reserve and what is evicted for it.

Evicts cached prefixes and idle slots only; pre-empting a running row is the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine.errors import KvPagesExhausted
from engine.failpoints import Failpoints, Site
from engine.memory.pages import SINK_PAGE, PageAllocator, PoolCorruption
from engine.memory.planner import pages_for
from engine.memory.prefix_index import PrefixRoot
from engine.requests import Request
from engine.scheduling.row import Row
from engine.slots.prefixes import Prefixes, Reuse
from engine.slots.table import Slot, SlotTable


@dataclass(frozen=True)
class Reserved:
    """Pages of the kv and of the swa pool that nobody else holds."""

    pages: list[int]
    window_pages: list[int]


class Room:
    """Pages for the slots of one table, taken from its pool."""

    def __init__(
        self,
        table: SlotTable,
        pages: PageAllocator,
        prefixes: Prefixes,
        failpoints: Failpoints,
    ) -> None:
        self._table = table
        self._pages = pages
        self._prefixes = prefixes
        self._moves = prefixes.moves
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
        return max(want, min(num_tokens, table.context_tokens))

    def fit(self, slot: Slot, reuse: Reuse, *, num_tokens: int) -> Reuse | None:
        """Returns as much of a prefix as an idle slot can hold together with `num_tokens` in all.

        None means that running rows hold too many pages; nothing is changed either way.
        """
        if self._fits(slot, reuse, num_tokens):
            return reuse
        # Without the page that is copied, the one that it is copied from may go.
        whole = self._prefixes.cut(slot, reuse)
        if whole.num_tokens and self._fits(slot, whole, num_tokens):
            return whole
        cold = Reuse(0, no_reuse="there is no room for what is reused beside the rest")
        return cold if self._fits(slot, cold, num_tokens) else None

    def admit(
        self,
        slot: Slot,
        root: PrefixRoot,
        reuse: Reuse,
        prompt: Sequence[int],
        *,
        num_tokens: int,
    ) -> None:
        """Puts a prefix into an idle slot and gives it pages for `num_tokens`.

        Cached prefixes and then idle slots, the least recently used first, lose theirs as far as
        that takes. Raises whatever the device raises; the slot is empty then.
        """
        if self._failpoints.fires(Site.EVICT):
            self._evict_one(besides=slot)
        if reuse.moved:
            self._admit_moved(slot, reuse, num_tokens)
            return
        needed = self._fresh_pages(reuse, num_tokens)
        with self._pinned(reuse):
            self._table.truncate(slot, reuse.num_tokens if reuse.is_own else 0)
            try:
                self._make_free(needed, besides=slot)
            except BaseException:
                # Cut, and its last page not copied: it must not be written on in.
                self._table.truncate(slot, 0)
                raise
            self._prefixes.put(slot, root, reuse, prompt)
        self._table.grow(slot, num_tokens)

    def move(self, slot: Slot, first: int, sources: Sequence[int]) -> bool:
        """Moves tokens within a slot, see `SlotMoves.move`.

        Returns False, with nothing changed but what could be evicted, if running rows hold the
        pages that it takes. Raises whatever the device raises; the slot must be discarded then.
        """
        while self._moves.num_fresh(slot, first, len(sources)) > self._pages.num_free:
            if self._table.unlist(slot, first) or self._table.index.evict(1):
                continue
            if not self._evict_one(besides=slot):
                return False
        self._moves.move(slot, first, sources)
        return True

    def extend(self, row: Row) -> bool:
        """Gives a running row the pages for its pending tokens.

        Returns False, with nothing changed, if running rows hold all the others. Raises whatever
        the device raises.
        """
        slot = row.home
        num_tokens = self._wanted(row)
        missing = self._table.pages_to_grow(slot, num_tokens)
        busy, _ = self._table.page_use()
        if missing > self._pages.size - len(busy):
            return False
        self._make_free(missing, besides=slot)
        self._table.grow(slot, num_tokens)
        return True

    def reserve(
        self, num_pages: int, num_window_pages: int, slot: Slot, *, may_evict: bool
    ) -> Reserved | None:
        """Takes pages for a state that will replace the slot's; None if others would lose theirs.

        With `may_evict` cached prefixes, checkpoints, idle slots and, last, the slot itself give way.

        Raises:
            KvPagesExhausted: Running requests hold too many; nothing has changed.
        """
        table, windows = self._table, self._table.windows
        others = {p for s in table.slots if not s.is_idle and s is not slot for p in s.pages}
        others |= {p for held in table.holdings for p in held.pages}
        free = self._pages.size - len(others)
        if num_pages > free:
            raise KvPagesExhausted(num_pages, free)
        most_windows = self.window_room(slot, may_evict=True)
        if num_window_pages > most_windows:
            raise KvPagesExhausted(num_window_pages, most_windows)
        free_windows = windows.num_free if windows else 0
        is_free = num_pages <= self._pages.num_free and num_window_pages <= free_windows
        if not is_free and not may_evict:
            return None
        self._make_free(num_pages, besides=slot)
        self._make_windows_free(num_window_pages, slot)
        if num_pages > self._pages.num_free:
            table.truncate(slot, 0)
            self._make_free(num_pages, besides=slot)
        if num_pages > self._pages.num_free:
            raise KvPagesExhausted(num_pages, self._pages.num_free)
        window_pages = windows.pages.allocate(num_window_pages) if windows else []
        return Reserved(self._pages.allocate(num_pages), window_pages)

    def window_room(self, slot: Slot, *, may_evict: bool) -> int:
        """Returns how many swa pages a slot can have beside the others'; checkpoints give way.

        With `may_evict` idle slots do, too.
        """
        if self._table.windows is None:
            return 0
        others = (s for s in self._table.slots if s is not slot and not (may_evict and s.is_idle))
        held = {page for other in others for page in other.window.page_ids} - {SINK_PAGE}
        return self._table.windows.pages.size - len(held)

    def refusal(self, num_tokens: int) -> KvPagesExhausted | None:
        """Returns why a sequence can never start, if the whole pool is smaller."""
        needed = pages_for(num_tokens, self._table.page_tokens)
        return KvPagesExhausted(needed, self._pages.size) if needed > self._pages.size else None

    def is_enough_for(self, row: Row) -> bool:
        """Returns whether the whole pool could hold the row with its pending tokens."""
        return self.refusal(self._wanted(row)) is None

    def is_short(self, row: Row) -> bool:
        """Returns whether the row's pending tokens need a page that its slot does not have."""
        return self._table.pages_to_grow(row.home, self._wanted(row)) > 0

    def _wanted(self, row: Row) -> int:
        return min(len(row.home.tokens) + row.num_pending, self._table.context_tokens)

    def _admit_moved(self, slot: Slot, reuse: Reuse, num_tokens: int) -> None:
        try:
            if not self.move(slot, reuse.num_tokens, reuse.moved):
                raise PoolCorruption("a move that fits found no pages")
        except BaseException:
            self._table.truncate(slot, 0)
            raise
        self._make_free(self._table.pages_to_grow(slot, num_tokens), besides=slot)
        self._table.grow(slot, num_tokens)

    def _fits(self, slot: Slot, reuse: Reuse, num_tokens: int) -> bool:
        busy, _ = self._table.page_use()
        if reuse.moved:
            # While tokens move, the slot may hold all that it held and a copy of it.
            own = len(slot.pages) + pages_for(num_tokens, self._table.page_tokens)
            return own <= self._pages.size - len(busy)
        kept = {*reuse.shared, reuse.copied} - busy - {SINK_PAGE}
        return self._fresh_pages(reuse, num_tokens) <= self._pages.size - len(busy) - len(kept)

    def _fresh_pages(self, reuse: Reuse, num_tokens: int) -> int:
        return pages_for(num_tokens, self._table.page_tokens) - len(reuse.shared)

    @contextmanager
    def _pinned(self, reuse: Reuse) -> Generator[None]:
        """Keeps what is about to be shared and copied from being evicted for it."""
        copied = [reuse.copied] if reuse.is_own and reuse.copied else []
        windows = self._table.windows
        window_held = reuse.checkpoint.window_pages if reuse.checkpoint else ()
        self._pages.share(copied)
        if windows:
            windows.pages.share(window_held)
        try:
            with self._table.index.keeping(reuse.nodes):
                yield
        finally:
            self._pages.release(copied)
            if windows:
                windows.pages.release(window_held)

    def _make_windows_free(self, num_pages: int, slot: Slot) -> None:
        """Makes room for a slot's windows, which running rows leave it."""
        windows = self._table.windows
        if windows is None:
            return
        windows.reclaim(num_pages)
        while windows.num_free < num_pages and self._evict_one(besides=slot):
            pass
        if windows.num_free < num_pages:
            self._table.truncate(slot, 0)

    def _make_free(self, num_pages: int, *, besides: Slot) -> None:
        while (missing := num_pages - self._pages.num_free) > 0:
            if not self._table.index.evict(missing) and not self._evict_one(besides=besides):
                break

    def _evict_one(self, *, besides: Slot) -> bool:
        evicted = self._table.evict_one(besides=besides)
        self.num_evicted += evicted
        return evicted
