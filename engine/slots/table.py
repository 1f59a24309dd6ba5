"""The slots: lanes that keep a sequence's tokens and pages between requests.

Decides which slot a request gets and how much of it can be reused; knows neither the queue nor
the runner. The pages of a slot always cover exactly the tokens that it may write next or holds.

Example:
    >>> table = SlotTable(2, context_tokens=256, page_tokens=32, pages=PageAllocator(16))
    >>> table.choose((1, 2, 3), tenant="", pinned=None).slot_id
    1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import NoSuchSlot
from engine.memory.pages import PageAllocator, PoolCorruption
from engine.memory.planner import pages_for
from engine.slots.window import WindowHeld, WindowPages
from engine.types import Request, SlotState

_COMPARE_TOKENS = 512


@dataclass(eq=False)
class Slot:
    """One lane. `tokens` are evaluated and lie in `pages`, in order; position = index.

    `window` are its pages of sliding-window layers, empty where the model has none. `last_used`
    orders releases (-1: never used). `tenant` owns the content. `request` is the one served now or
    last, `task_id` its number (-1: none yet).
    """

    slot_id: int
    tokens: list[int] = field(default_factory=list[int])
    pages: list[int] = field(default_factory=list[int])
    window: WindowHeld = field(default_factory=WindowHeld)
    state: SlotState = SlotState.IDLE
    tenant: str = ""
    request: Request | None = None
    task_id: int = -1
    last_used: int = -1

    @property
    def is_idle(self) -> bool:
        """True when no request and no transfer uses the slot."""
        return self.state is SlotState.IDLE


@dataclass(frozen=True)
class Reuse:
    """How many leading prompt tokens a slot already holds, and why none if 0."""

    num_tokens: int
    no_reuse: str


class SlotTable:
    """All slots of an engine and the pages that they hold."""

    def __init__(
        self,
        num_slots: int,
        *,
        context_tokens: int,
        page_tokens: int,
        pages: PageAllocator,
        similarity: float = 0.1,
        windows: WindowPages | None = None,
    ) -> None:
        """Makes empty slots; `similarity` 0 turns the choice by prefix off.

        `windows` is the swa pool of a model with sliding-window layers.
        """
        self.context_tokens = context_tokens
        self.page_tokens = page_tokens
        self._pages = pages
        self._windows = windows
        self._similarity = similarity
        self._num_releases = 0
        self._slots = tuple(Slot(slot_id) for slot_id in range(num_slots))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots by id."""
        return self._slots

    @property
    def windows(self) -> WindowPages | None:
        """The swa pool, None where the model has no sliding-window layers."""
        return self._windows

    def slot(self, slot_id: int) -> Slot:
        """Returns a slot by id.

        Raises:
            NoSuchSlot: there is none with this id.
        """
        if not 0 <= slot_id < len(self._slots):
            raise NoSuchSlot(slot_id, len(self._slots))
        return self._slots[slot_id]

    def choose(self, prompt: Sequence[int], *, tenant: str, pinned: int | None) -> Slot | None:
        """Returns the idle slot for a prompt, or None if it has to wait.

        A pinned request takes its slot and no other. Otherwise the highest share of the prompt
        that a slot holds, strictly above the limit, ties to the lower id; else the least recently
        used, ties to the highest id.

        Source: server_context::get_available_slot (contract 5.1).
        """
        if pinned is not None:
            slot = self.slot(pinned)
            return slot if slot.is_idle else None
        idle = [slot for slot in self._slots if slot.is_idle]
        if not idle:
            return None
        return self._most_similar(idle, prompt, tenant) or _least_recent(idle)

    def reuse(self, slot: Slot, request: Request, prompt: Sequence[int]) -> Reuse:
        """Returns how much of `prompt` the slot's pages already hold for this request.

        At least one token is left to evaluate, because its logits are needed: the same prompt
        again reuses all but one.
        """
        if not request.cache_prompt:
            return Reuse(0, "the request turned prompt caching off")
        if not slot.tokens:
            return Reuse(0, "the slot is empty")
        if slot.tenant != request.tenant:
            return Reuse(0, "the slot's content is another tenant's")
        shared = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
        if not shared:
            return Reuse(0, "the slot shares no prefix with the prompt")
        if self._windows and not self._windows.can_continue(slot.window, shared):
            return Reuse(0, f"the window before token {shared} is no longer held")
        return Reuse(shared, "")

    def pages_to_grow(self, slot: Slot, num_tokens: int) -> int:
        """Returns how many more pages the slot needs to hold `num_tokens` in all."""
        return max(0, pages_for(num_tokens, self.page_tokens) - len(slot.pages))

    def grow(self, slot: Slot, num_tokens: int) -> None:
        """Gives the slot the pages for `num_tokens` in all.

        Raises:
            OutOfPages: too few are free; the slot is unchanged.
        """
        slot.pages += self._pages.allocate(self.pages_to_grow(slot, num_tokens))

    def cover(self, slot: Slot, num_tokens: int) -> None:
        """Gives a slot the window pages that evaluating up to `num_tokens` writes.

        The pool is sized so that running rows never lack one.
        """
        if self._windows:
            self._windows.cover(slot.window, num_tokens)

    def slide(self, slot: Slot, *, after_chunk: bool) -> None:
        """Gives back window pages behind the window, after a chunk or when a trim is due."""
        num_tokens = len(slot.tokens)
        if self._windows and (after_chunk or self._windows.is_due(slot.window, num_tokens)):
            self._windows.trim(slot.window, num_tokens)

    def truncate(self, slot: Slot, num_tokens: int) -> int:
        """Keeps the first `num_tokens` tokens and their pages; returns the kv pages freed."""
        if self._windows:
            self._windows.truncate(slot.window, num_tokens)
        del slot.tokens[num_tokens:]
        keep = pages_for(len(slot.tokens), self.page_tokens)
        dropped = slot.pages[keep:]
        del slot.pages[keep:]
        return self._pages.release(dropped)

    def release(self, slot: Slot) -> None:
        """Ends a slot's work: it keeps its tokens, gives back unused pages and becomes idle."""
        self.truncate(slot, len(slot.tokens))
        self.slide(slot, after_chunk=True)
        slot.state = SlotState.IDLE
        slot.last_used = self._num_releases
        self._num_releases += 1

    def idle_pages(self, *, besides: Slot | None = None) -> int:
        """Returns how many pages idle slots hold, `besides` left out."""
        return sum(len(s.pages) for s in self._slots if s.is_idle and s is not besides)

    def idle_window_pages(self) -> int:
        """Returns how many swa pages idle slots hold."""
        return sum(slot.window.num_pages for slot in self._slots if slot.is_idle)

    def evict_one(self, *, besides: Slot | None = None) -> bool:
        """Empties the least recently used idle slot that holds pages; False if there is none."""
        candidates = [s for s in self._slots if s.is_idle and s.pages and s is not besides]
        if not candidates:
            return False
        self.truncate(_least_recent(candidates), 0)
        return True

    def empty_all(self) -> None:
        """Empties every slot."""
        for slot in self._slots:
            self.truncate(slot, 0)

    def check_integrity(self) -> None:
        """Proves that every page has the holder that it should have.

        Raises:
            PoolCorruption: a page leaked or is shared, or a slot's pages do not fit its tokens.
        """
        self._pages.check_integrity(slot.pages for slot in self._slots)
        if self._windows:
            self._windows.check_integrity((slot.window, len(slot.tokens)) for slot in self._slots)
        for slot in self._slots:
            needed = pages_for(len(slot.tokens), self.page_tokens)
            spare = len(slot.pages) - needed
            if spare < 0 or (spare and slot.is_idle):
                raise PoolCorruption(
                    f"slot {slot.slot_id} has {len(slot.pages)} pages for {needed} pages of tokens"
                )
            if len(slot.tokens) > self.context_tokens:
                raise PoolCorruption(
                    f"slot {slot.slot_id} holds {len(slot.tokens)} tokens in a context of "
                    f"{self.context_tokens}"
                )

    def _most_similar(self, idle: list[Slot], prompt: Sequence[int], tenant: str) -> Slot | None:
        if self._similarity == 0 or not prompt:
            return None
        best, best_share = None, self._similarity
        for slot in idle:
            if slot.tenant != tenant:
                continue
            share = common_prefix(slot.tokens, prompt) / len(prompt)
            if share > best_share:
                best, best_share = slot, share
        return best


def common_prefix(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns the length of the longest common prefix."""
    end = min(len(held), len(prompt))
    # Whole blocks are compared as lists, in C; only the block that differs is walked.
    for start in range(0, end, _COMPARE_TOKENS):
        stop = min(start + _COMPARE_TOKENS, end)
        if list(held[start:stop]) == list(prompt[start:stop]):
            continue
        return next(i for i in range(start, stop) if held[i] != prompt[i])
    return end


def _least_recent(slots: list[Slot]) -> Slot:
    return min(slots, key=lambda slot: (slot.last_used, -slot.slot_id))
