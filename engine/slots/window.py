"""Pages of sliding-window layers: each sequence keeps the last window and a little slack.

A sequence's list has one entry per page of positions, 0 where the page lies behind the window and
was given back. Knows page ids only; the kv pool's pages are in `engine.slots.table`.

Example:
    >>> policy = WindowPolicy(window=16, page_tokens=16, interval_tokens=128)
    >>> windows = WindowPages(policy, PageAllocator(8))
    >>> held = windows.begin()
    >>> windows.cover(held, 64)
    >>> windows.trim(held, 64)
    2
    >>> held.page_ids
    [0, 0, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.memory.pages import SINK_PAGE, PageAllocator, PoolCorruption
from engine.memory.planner import WINDOW_SLACK_TOKENS, pages_for


@dataclass(frozen=True)
class WindowPolicy:
    """A query at position p sees positions p - window + 1 .. p.

    Pages behind the window are given back after every prefill chunk and every `interval_tokens`
    decode steps.
    """

    window: int
    page_tokens: int
    interval_tokens: int

    def first_kept(self, num_tokens: int) -> int:
        """Returns the first position that a sequence of `num_tokens` keeps."""
        return max(0, num_tokens - self.window - WINDOW_SLACK_TOKENS)

    def first_needed(self, num_tokens: int) -> int:
        """Returns the first position that the token after `num_tokens` sees."""
        return max(0, num_tokens - self.window + 1)


@dataclass(eq=False)
class WindowHeld:
    """What one slot holds of the swa pool. `trimmed_at` is its length at the last trim."""

    page_ids: list[int] = field(default_factory=list[int])
    trimmed_at: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that are really held."""
        return sum(page_id != SINK_PAGE for page_id in self.page_ids)


class WindowPages:
    """The swa pool as slots use it."""

    def __init__(self, policy: WindowPolicy, pages: PageAllocator) -> None:
        self.policy = policy
        self.pages = pages

    def begin(self) -> WindowHeld:
        """Returns an empty holding."""
        return WindowHeld()

    def cover(self, held: WindowHeld, num_tokens: int) -> None:
        """Takes the pages that positions up to `num_tokens` need and the holding lacks.

        Raises:
            OutOfPages: too few are free; nothing was taken.
        """
        missing = pages_for(num_tokens, self.policy.page_tokens) - len(held.page_ids)
        held.page_ids += self.pages.allocate(max(0, missing))

    def trim(self, held: WindowHeld, num_tokens: int) -> int:
        """Gives back the pages behind the window of a sequence of `num_tokens`; returns how many."""
        held.trimmed_at = num_tokens
        end = self.policy.first_kept(num_tokens) // self.policy.page_tokens
        gone = [page_id for page_id in held.page_ids[:end] if page_id != SINK_PAGE]
        held.page_ids[:end] = [SINK_PAGE] * len(held.page_ids[:end])
        return self.pages.release(gone)

    def is_due(self, held: WindowHeld, num_tokens: int) -> bool:
        """Returns whether so many tokens have come since the last trim that another is due."""
        return num_tokens - held.trimmed_at >= self.policy.interval_tokens

    def truncate(self, held: WindowHeld, num_tokens: int) -> int:
        """Gives back the pages past `num_tokens`; returns how many became free."""
        keep = pages_for(num_tokens, self.policy.page_tokens)
        gone = [page_id for page_id in held.page_ids[keep:] if page_id != SINK_PAGE]
        del held.page_ids[keep:]
        held.trimmed_at = min(held.trimmed_at, num_tokens)
        return self.pages.release(gone)

    def can_continue(self, held: WindowHeld, num_tokens: int) -> bool:
        """Returns whether all that the token after the first `num_tokens` sees is still held."""
        first = self.policy.first_needed(num_tokens) // self.policy.page_tokens
        end = pages_for(num_tokens, self.policy.page_tokens)
        return len(held.page_ids) >= end and SINK_PAGE not in held.page_ids[first:end]

    def check_integrity(self, holdings: Iterable[tuple[WindowHeld, int]]) -> None:
        """Proves the books, given each holding and its sequence's length.

        Raises:
            PoolCorruption: a page leaked or is shared, or a window is not covered.
        """
        listed = list(holdings)
        self.pages.check_integrity(
            [page_id for page_id in held.page_ids if page_id != SINK_PAGE] for held, _ in listed
        )
        for held, num_tokens in listed:
            if not self.can_continue(held, num_tokens):
                raise PoolCorruption(f"the window of {num_tokens} tokens has holes: {held}")
