"""Pages of sliding-window layers: each sequence keeps the last window and a little slack.

A sequence's list has one entry per page of positions, 0 where the page lies behind the window and
was given back. Knows page ids only; the kv pool's pages are in `engine.slots.table`.

Example:
    >>> policy = WindowPolicy(window=16, page_tokens=16, interval_tokens=128)
    >>> windows = WindowPages(policy, PageAllocator(8))
    >>> held = WindowHeld()
    >>> windows.cover(held, 64)
    >>> windows.trim(held, 64)
    2
    >>> held.page_ids
    [0, 0, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.memory.checkpoint import Checkpoint, Checkpoints
from engine.memory.pages import SINK_PAGE, PageAllocator, PoolCorruption
from engine.memory.planner import WINDOW_SLACK_TOKENS, pages_for


@dataclass(frozen=True)
class WindowPolicy:
    """A query at position p sees p - window + 1 .. p.

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
    """What one slot holds of the swa pool.

    The first `num_behind` entries of `page_ids` lie behind the window and are 0, the others are
    held. `trimmed_at` is the sequence's length at the last trim. The sequence cannot be cut below
    `lowest` tokens (0: anywhere): what came from elsewhere may fill its first page in part only.
    """

    page_ids: list[int] = field(default_factory=list[int])
    num_behind: int = 0
    trimmed_at: int = 0
    lowest: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that are really held."""
        return len(self.page_ids) - self.num_behind


class WindowPages:
    """The swa pool as slots use it. `checkpoints` hold pages too, until a slot needs them."""

    def __init__(self, policy: WindowPolicy, pages: PageAllocator) -> None:
        self.policy = policy
        self.checkpoints = Checkpoints(pages)
        self.pages = pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self.pages.num_free

    def cover(self, held: WindowHeld, num_tokens: int) -> None:
        """Takes the pages that positions up to `num_tokens` need and the holding lacks.

        Raises:
            OutOfPages: too few are free; nothing was taken.
        """
        missing = pages_for(num_tokens, self.policy.page_tokens) - len(held.page_ids)
        if missing > 0:
            self.reclaim(missing)
            held.page_ids += self.pages.allocate(missing)

    def reclaim(self, num_pages: int) -> None:
        """Drops checkpoints, the oldest first, until so many pages are free or none is left."""
        self.checkpoints.reclaim(num_pages)

    def checkpoint(self, held: WindowHeld, num_tokens: int) -> Checkpoint:
        """Returns what continues a sequence of `num_tokens` later; its pages are not held yet."""
        start = held.num_behind * self.policy.page_tokens
        return Checkpoint(
            position=num_tokens,
            lowest=max(held.lowest, start + self.policy.window - 1 if start else 1),
            first_page=held.num_behind,
            window_pages=tuple(held.page_ids[held.num_behind :]),
        )

    def adopt(self, held: WindowHeld, checkpoint: Checkpoint, num_tokens: int) -> None:
        """Makes an empty holding share the window of a sequence cut to `num_tokens`."""
        first = checkpoint.first_page
        count = pages_for(num_tokens, self.policy.page_tokens) - first
        shared = checkpoint.window_pages[: max(0, count)]
        self.pages.share(shared)
        held.page_ids = [SINK_PAGE] * first + list(shared)
        held.num_behind = first
        held.lowest = checkpoint.lowest
        self.checkpoints.touch(checkpoint)
        self.trim(held, num_tokens)

    def trim(self, held: WindowHeld, num_tokens: int) -> int:
        """Gives back the pages behind the window of a sequence of `num_tokens`; returns how many."""
        held.trimmed_at = num_tokens
        start = held.num_behind
        end = min(self.policy.first_kept(num_tokens) // self.policy.page_tokens, len(held.page_ids))
        if end <= start:
            return 0
        gone = held.page_ids[start:end]
        held.page_ids[start:end] = [SINK_PAGE] * len(gone)
        held.num_behind = end
        return self.pages.release(gone)

    def is_due(self, held: WindowHeld, num_tokens: int) -> bool:
        """Returns whether so many tokens have come since the last trim that another is due."""
        return num_tokens - held.trimmed_at >= self.policy.interval_tokens

    def truncate(self, held: WindowHeld, num_tokens: int) -> int:
        """Gives back the pages past `num_tokens`; returns how many became free."""
        keep = pages_for(num_tokens, self.policy.page_tokens)
        gone = held.page_ids[max(keep, held.num_behind) :]
        del held.page_ids[keep:]
        held.num_behind = min(held.num_behind, keep)
        held.trimmed_at = min(held.trimmed_at, num_tokens)
        if not num_tokens:
            held.lowest = 0
        return self.pages.release(gone)

    def can_continue(self, held: WindowHeld, num_tokens: int) -> bool:
        """Returns whether all that the token after the first `num_tokens` sees is still held."""
        if 0 < num_tokens < held.lowest:
            return False
        first = self.policy.first_needed(num_tokens) // self.policy.page_tokens
        end = pages_for(num_tokens, self.policy.page_tokens)
        return len(held.page_ids) >= end and (first >= held.num_behind or first >= end)

    def check_integrity(self, holdings: Iterable[tuple[WindowHeld, int]]) -> None:
        """Proves the books, given each holding and its sequence's length; only between steps.

        Raises:
            PoolCorruption: a page leaked, a window is not covered, or more is held
                than the policy keeps.
        """
        listed = list(holdings)
        slots = [held.page_ids[held.num_behind :] for held, _ in listed]
        self.pages.check_integrity([*slots, *self.checkpoints.held_pages()])
        for held, num_tokens in listed:
            self._check(held, num_tokens)

    def _check(self, held: WindowHeld, num_tokens: int) -> None:
        page_tokens = self.policy.page_tokens
        needed = pages_for(num_tokens, page_tokens)
        if len(held.page_ids) != needed:
            raise PoolCorruption(f"{len(held.page_ids)} window pages for {needed} pages of tokens")
        if not self.can_continue(held, num_tokens):
            raise PoolCorruption(f"the window of {num_tokens} tokens has holes: {held}")
        behind = min(self.policy.first_kept(held.trimmed_at) // page_tokens, needed)
        if self.is_due(held, num_tokens) or held.num_behind < behind:
            raise PoolCorruption(f"pages behind the window of {num_tokens} tokens: {held}")
