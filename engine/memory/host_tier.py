"""Host memory for pages that lost their place on the device: a hard limit, and the copying.

Which pages are kept is the prefix index's decision; this counts bytes, its bookkeeping included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.memory.pages import PoolCorruption
from engine.step import PageContent, PageStore
from engine.types import PoolKind

# What the interpreter keeps for one page in the index besides its content and its key, measured.
NODE_BYTES = 1100
# The part of the limit that the books may take.
_BOOKS_PART = 20


@dataclass(frozen=True)
class HostUse:
    """Bytes of host memory: of what pages hold, and of the books that are kept of them."""

    content: int = 0
    books: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.content + self.books

    def __add__(self, other: HostUse) -> HostUse:
        return HostUse(self.content + other.content, self.books + other.books)

    def __sub__(self, other: HostUse) -> HostUse:
        return HostUse(self.content - other.content, self.books - other.books)


class HostTier:
    """Counts the bytes of pages on the host and reads and writes them.

    The limit is one of all bytes. The books may take a 20th of it, so where pages are smaller than
    they are worth, fewer of them are kept than would fit.

    Example:
        >>> HostTier(None, limit_bytes=0).admits(b"")
        False
    """

    def __init__(self, store: PageStore | None, *, limit_bytes: int | None) -> None:
        """`limit_bytes` None is unlimited, 0 turns the tier off, as does a missing `store`."""
        self._store = store
        self._limit_bytes = 0 if store is None else limit_bytes
        self.used = HostUse()

    def admits(self, key: bytes) -> bool:
        """Returns whether a page with this key can be kept at all."""
        needed = self.cost_of(key)
        return needed is not None and self.allows(needed)

    def cost_of(self, key: bytes) -> HostUse | None:
        """Returns what a page with this key takes; None while the tier is off."""
        if self._store is None or self._limit_bytes == 0:
            return None
        layout = self._store.page_layout(PoolKind.KV)
        return HostUse(layout.token_bytes * (len(key) // 4), NODE_BYTES + len(key))

    def allows(self, use: HostUse) -> bool:
        """Returns whether so much in all is within the limits."""
        limit = self._limit_bytes
        return limit is None or (use.total <= limit and use.books <= limit // _BOOKS_PART)

    def has_room(self, content: PageContent, key: bytes) -> bool:
        """Returns whether a page more would stay within the limits."""
        return self.allows(self.used + _cost(content, key))

    def take(self, content: PageContent, key: bytes) -> None:
        """Counts a page."""
        self.used += _cost(content, key)

    def give_back(self, content: PageContent, key: bytes) -> None:
        """Counts a page no longer."""
        self.used -= _cost(content, key)

    def read(self, pages: Sequence[tuple[int, int]]) -> list[PageContent]:
        """Copies pages of the kv pool to the host, of each (page id, tokens) the first tokens.

        Raises whatever the device raises.
        """
        store, found = self._store, list[PageContent]()
        if store is None:
            return found
        step = store.transfer_pages
        page_tokens = store.page_layout(PoolKind.KV).page_tokens
        for first in range(0, len(pages), step):
            piece = pages[first : first + step]
            content = store.read_pages(PoolKind.KV, [page_id for page_id, _ in piece]).wait()
            for index, (_, num_tokens) in enumerate(piece):
                span = slice(index * page_tokens, index * page_tokens + num_tokens)
                found.append(_copy(content, span))
        return found

    def write(self, page_ids: Sequence[int], contents: Sequence[PageContent]) -> None:
        """Copies pages back to the device, of which the last may be filled in part.

        Raises whatever the device raises.
        """
        store = self._store
        assert store is not None, "a tier that is off holds nothing"
        step = store.transfer_pages
        for first in range(0, len(page_ids), step):
            piece = contents[first : first + step]
            joined = PageContent(
                np.concatenate([content.keys for content in piece], axis=1),
                np.concatenate([content.values for content in piece], axis=1),
            )
            store.write_pages(PoolKind.KV, page_ids[first : first + step], joined)

    def check_integrity(self, contents: Sequence[PageContent]) -> None:
        """Proves that the bytes are within the limits and are those of `contents`.

        Raises:
            PoolCorruption: they are not.
        """
        held = sum(content.keys.nbytes + content.values.nbytes for content in contents)
        if self.used.content != held or self.used.books < NODE_BYTES * len(contents):
            raise PoolCorruption(f"{self.used} counted for {len(contents)} pages of {held} bytes")
        if not self.allows(self.used):
            raise PoolCorruption(f"{self.used} on the host, the limit is {self._limit_bytes}")


def _cost(content: PageContent, key: bytes) -> HostUse:
    return HostUse(content.keys.nbytes + content.values.nbytes, NODE_BYTES + len(key))


def _copy(content: PageContent, span: slice) -> PageContent:
    return PageContent(content.keys[:, span].copy(), content.values[:, span].copy())
