"""Page ids: which are free and how often each is held. Integers only.

Knows nothing of tensors, slots or requests. Page 0 of every pool is the write sink of padding rows,
so it is never handed out and never counted.

Example:
    >>> pages = PageAllocator(4)
    >>> held = pages.allocate(2)
    >>> pages.num_free
    2
    >>> pages.release(held)
    >>> pages.check_integrity([])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SINK_PAGE = 0


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages needed, {free} free")
        self.needed = needed
        self.free = free


class PoolCorruption(RuntimeError):
    """An internal invariant of a pool is broken: a bug of the caller, never bad input."""


class PageAllocator:
    """Hands out page ids 1..size and counts the holders of each; every operation is O(1) a page."""

    def __init__(self, size: int) -> None:
        """Makes a pool of `size` usable pages, all free; `num_changes` counts what is done to it.

        Raises:
            ValueError: `size` is not positive.
        """
        if size < 1:
            raise ValueError(f"a pool of {size} pages: at least 1 is needed")
        self._holders = [0] * (size + 1)
        # A stack, low ids on top: a page just freed is the next one used, and is still in cache.
        self._free = list(range(size, 0, -1))
        self.num_changes = 0

    @property
    def size(self) -> int:
        """Usable pages; the sink is extra."""
        return len(self._holders) - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def held_ids(self) -> list[int]:
        """Returns the pages that have a holder, rising."""
        return [page_id for page_id, count in enumerate(self._holders) if count]

    def resize(self, size: int) -> dict[int, int]:
        """Gives the pool another size; pages that are held are numbered anew, 1 and up, in order.

        Returns each old id with its new one, which every holder must use from now on.

        Raises:
            ValueError: `size` is not positive, or more pages are held; nothing has changed.
        """
        held = self.held_ids()
        if size < max(1, len(held)):
            raise ValueError(f"{len(held)} pages are held of a pool of {size}")
        counts = [self._holders[page_id] for page_id in held]
        self._holders = [0, *counts, *[0] * (size - len(held))]
        self._free = list(range(size, len(held), -1))
        self.num_changes += 1
        return {old: new for new, old in enumerate(held, 1)}

    def num_holders(self, page_id: int) -> int:
        """Returns how many holders a page has.

        Raises:
            PoolCorruption: the id is not one of 1..size.
        """
        self._check_range(page_id)
        return self._holders[page_id]

    def allocate(self, num_pages: int) -> list[int]:
        """Takes pages out of the pool, each with one holder: all of them or none.

        Raises:
            ValueError: `num_pages` is negative.
            OutOfPages: fewer are free.
        """
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            raise OutOfPages(num_pages, len(self._free))
        self.num_changes += 1
        taken = [self._free.pop() for _ in range(num_pages)]
        for page_id in taken:
            self._holders[page_id] = 1
        return taken

    def share(self, page_ids: Sequence[int]) -> None:
        """Adds one holder to each page.

        Raises:
            PoolCorruption: a page is free or out of range; no count has changed then.
        """
        for page_id in page_ids:
            if self.num_holders(page_id) == 0:
                raise PoolCorruption(f"page {page_id} is free and cannot be shared")
        self.num_changes += 1
        for page_id in page_ids:
            self._holders[page_id] += 1

    def release(self, page_ids: Sequence[int]) -> int:
        """Takes one holder from each page and returns how many became free.

        Raises:
            PoolCorruption: a page is out of range or has too few holders (a double free); no count
                has changed then.
        """
        for page_id, times in Counter(page_ids).items():
            if self.num_holders(page_id) < times:
                raise PoolCorruption(
                    f"page {page_id} is released {times} times but has "
                    f"{self._holders[page_id]} holders"
                )
        self.num_changes += 1
        freed = 0
        for page_id in page_ids:
            self._holders[page_id] -= 1
            if self._holders[page_id] == 0:
                self._free.append(page_id)
                freed += 1
        return freed

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Proves that `held`, the page lists of all holders, explains every count. O(size).

        Raises:
            PoolCorruption: a page leaked, is held unseen, or is both free and held.
        """
        expected = Counter(page_id for page_ids in held for page_id in page_ids)
        for page_id in expected:
            self._check_range(page_id)
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolCorruption("a page is on the free list twice")
        for page_id in range(1, self.size + 1):
            if self._holders[page_id] != expected[page_id]:
                raise PoolCorruption(
                    f"page {page_id} counts {self._holders[page_id]} holders, "
                    f"{expected[page_id]} hold it"
                )
            if (page_id in free) != (expected[page_id] == 0):
                raise PoolCorruption(f"page {page_id} is free and held, or neither")

    def _check_range(self, page_id: int) -> None:
        if not 1 <= page_id <= self.size:
            raise PoolCorruption(f"page id {page_id} is outside 1..{self.size}")
