"""The slots: lanes that keep a sequence's tokens and pages between requests.

Decides which slot a request gets, and lists what slots hold in the prefix index; knows neither the
queue nor the runner. The pages of a slot always cover exactly the tokens that it may write next or
holds.

Example:
    >>> table = SlotTable(2, context_tokens=256, page_tokens=32, pages=PageAllocator(16))
    >>> table.choose((1, 2, 3), root=PrefixRoot(b"", "f16", b"", ""), pinned=None).slot_id
    1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import NoSuchSlot
from engine.memory.checkpoint import Checkpoint, Checkpoints
from engine.memory.host_tier import HostTier
from engine.memory.pages import PageAllocator, PoolCorruption
from engine.memory.planner import pages_for
from engine.memory.prefix_index import PageNode, PrefixIndex, PrefixRoot, encode
from engine.requests import Request
from engine.slots.states import RecurrentStates
from engine.slots.window import WindowHeld, WindowPages
from engine.types import SlotState

_COMPARE_TOKENS = 512
_CHECKPOINT_TOKENS = 1024


@dataclass(eq=False)
class Slot:
    """One lane. `tokens` are evaluated and lie in `pages`, in order; position = index.

    `nodes` are the first of these pages that the prefix index lists, under `root` (None: nothing
    was held yet). `window` are its pages of sliding-window layers, empty where the model has none;
    `state_id` is the state of its recurrent layers, after all its tokens (0: the model has none).
    Tokens from `marked_from` on were moved from elsewhere, or made under an activated adapter, so
    no other slot may use them (None: none was). `last_used` orders releases (-1: never used).
    `request` is the one served now or last, `task_id` its number (-1: none yet).
    """

    slot_id: int
    tokens: list[int] = field(default_factory=list[int])
    pages: list[int] = field(default_factory=list[int])
    nodes: list[PageNode] = field(default_factory=list[PageNode])
    root: PrefixRoot | None = None
    marked_from: int | None = None
    window: WindowHeld = field(default_factory=WindowHeld)
    state: SlotState = SlotState.IDLE
    request: Request | None = None
    task_id: int = -1
    last_used: int = -1
    state_id: int = 0

    @property
    def is_idle(self) -> bool:
        """True when no request and no transfer uses the slot."""
        return self.state is SlotState.IDLE

    def mark(self, position: int) -> None:
        """Keeps what lies from a position on to this slot."""
        self.marked_from = position if self.marked_from is None else min(position, self.marked_from)

    @property
    def tenant(self) -> str:
        """Whose content it is."""
        return self.root.tenant if self.root else ""


@dataclass(eq=False)
class Holding:
    """Pages that are held outside of any slot: of a slot that is being restored, or was displaced."""

    pages: list[int]


@dataclass(frozen=True)
class _PageUse:
    """Which pages busy slots and holdings hold, which only idle slots do, and when that was so."""

    at: tuple[int, int, tuple[bool, ...]]
    busy: frozenset[int]
    idle: frozenset[int]


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
        index: PrefixIndex | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """Makes empty slots; `similarity` 0 turns the choice by prefix off.

        `windows` is the swa pool of a model with sliding-window layers, `states` the mamba pool of
        one with recurrent layers; no model has both. `index` is one over
        `pages`; None makes one without a host tier.
        """
        self.context_tokens = context_tokens
        self.page_tokens = page_tokens
        self._pages = pages
        self._windows = windows
        self.states = states
        keeper = windows or states
        self.checkpoints = keeper.checkpoints if keeper else Checkpoints(None)
        self.index = index or PrefixIndex(pages, page_tokens, HostTier(None, limit_bytes=0))
        self._use: _PageUse | None = None
        self._similarity = similarity
        self._num_releases = 0
        self._slots = tuple(
            Slot(slot_id, state_id=states.own(slot_id) if states else 0)
            for slot_id in range(num_slots)
        )
        self.holdings: list[Holding] = []
        self._num_handed = 0  # how often pages went to or from a holding

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

    def choose(self, prompt: Sequence[int], *, root: PrefixRoot, pinned: int | None) -> Slot | None:
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
        return self._most_similar(idle, prompt, root) or _least_recent(idle)

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
        """Keeps the first `num_tokens` tokens and their pages; returns the kv pages freed.

        What the prefix index lists stays listed, and its pages stay held.
        """
        if self._windows:
            self._windows.truncate(slot.window, num_tokens)
        del slot.tokens[num_tokens:]
        keep = pages_for(len(slot.tokens), self.page_tokens)
        dropped = slot.pages[keep:]
        del slot.pages[keep:]
        del slot.nodes[keep:]
        if slot.nodes and not self._vouches(len(slot.nodes) - 1, slot):
            slot.nodes.pop()
        if slot.marked_from is not None and slot.marked_from >= len(slot.tokens):
            slot.marked_from = None
        return self._pages.release(dropped)

    def cut_back(self, slot: Slot, num_tokens: int) -> None:
        """Keeps the first tokens of a slot as far as it can go on from there, else none."""
        if self._windows and not self._windows.can_continue(slot.window, num_tokens):
            num_tokens = 0
        if self.states and num_tokens < len(slot.tokens):
            num_tokens = 0
        self.truncate(slot, num_tokens)

    def register(self, slot: Slot, *, is_end: bool = True) -> None:
        """Lists what the slot holds in the prefix index, so that any slot can share it.

        At the end of a prompt or of an answer, and now and then inside a long prompt, a checkpoint
        is kept of where the slot stands.
        """
        root = slot.root
        if root is None or not slot.tokens:
            return
        num_tokens = len(slot.tokens)
        if slot.marked_from is not None:
            num_tokens = slot.marked_from // self.page_tokens * self.page_tokens
        self.index.insert(root, encode(slot.tokens[:num_tokens]), slot.pages, slot.nodes)
        if not is_end and num_tokens - _last_checkpoint(slot) < _CHECKPOINT_TOKENS:
            return
        if self._windows and slot.marked_from is None:
            self._keep(slot, self._windows.checkpoint(slot.window, num_tokens))

    def next_stop(self, slot: Slot, prompt_tokens: int) -> int | None:
        """Returns where the evaluation of a prompt must stop next for a snapshot, if anywhere."""
        if self.states is None:
            return None
        return self.states.next_stop(len(slot.tokens), prompt_tokens)

    def snapshot(self, slot: Slot, position: int) -> Checkpoint | None:
        """Lists a checkpoint within what a slot holds and returns it, to be filled.

        None if there is one already, no state for it, or the tokens are nobody else's to use.
        """
        assert self.states is not None
        self.register(slot)
        node = (position - 1) // self.page_tokens
        if slot.marked_from is not None or node >= len(slot.nodes):
            return None
        for other in slot.nodes[node].checkpoints:
            if other.position == position:
                self.checkpoints.touch(other)
                return None
        state_id = self.states.take()
        if state_id is None:
            return None
        checkpoint = Checkpoint(position, lowest=position, state_id=state_id)
        self._keep(slot, checkpoint)
        return checkpoint if checkpoint.owner else None

    def release(self, slot: Slot) -> None:
        """Ends a slot's work: it keeps its tokens, gives back unused pages and becomes idle."""
        self.truncate(slot, len(slot.tokens))
        self.slide(slot, after_chunk=True)
        self.register(slot)
        slot.state = SlotState.IDLE
        slot.last_used = self._num_releases
        self._num_releases += 1

    def adopt(
        self,
        slot: Slot,
        root: PrefixRoot,
        tokens: Sequence[int],
        pages: Sequence[int],
        window: WindowHeld | None = None,
        checkpoints: Sequence[Checkpoint] = (),
        *,
        marked_from: int | None = None,
    ) -> None:
        """Makes an idle slot hold a state that somebody put into pages, and lists it.

        From then on the ordinary prefix match finds it, as if the slot had evaluated `tokens`. What
        the slot held before is let go first; as far as it is listed it stays reusable.

        Args:
            slot: The slot; idle.
            root: What the state was made under.
            tokens: The tokens whose state it is, at least one.
            pages: Their kv pages in order, exactly as many as they need, each with one holder that
                becomes the slot.
            window: Likewise of the swa pool, trimmed; None where the model has no windows.
            marked_from: First token that was moved from elsewhere, None if none was.
            checkpoints: Where else the sequence can be continued. They get holders of their own on
                the pages that they name, so the caller gives its own back.
        """
        self.truncate(slot, 0)
        slot.root, slot.tokens, slot.pages = root, list(tokens), list(pages)
        slot.marked_from = marked_from
        if window is not None:
            slot.window = window
        self.release(slot)
        for checkpoint in checkpoints:
            self._keep(slot, checkpoint)

    def checkpoints_of(self, slot: Slot, *, before: int) -> list[Checkpoint]:
        """Returns where a slot's sequence can be continued before a position, one for each position."""
        found = [c for node in slot.nodes for c in node.checkpoints if c.position < before]
        return list({c.position: c for c in sorted(found, key=lambda c: c.position)}.values())

    def discard(self, slot: Slot, first_token: int) -> None:
        """Empties a slot whose content from some token on may be anything.

        What only this slot held of that is forgotten.
        """
        self.unlist(slot, first_token)
        del slot.nodes[first_token // self.page_tokens :]
        self.truncate(slot, 0)

    def unlist(self, slot: Slot, first_token: int) -> bool:
        """Takes pages from some token on off the prefix index that only this slot holds.

        Returns False if there is none.
        """
        for index in range(first_token // self.page_tokens, len(slot.nodes)):
            if self._pages.num_holders(slot.nodes[index].page_id) == 2:
                self.index.drop(slot.nodes[index])
                del slot.nodes[index:]
                return True
        return False

    def erase(self, slot: Slot) -> int:
        """Empties a slot and forgets what only it held; returns how many pages became free."""
        nodes = list(slot.nodes)
        freed = self.truncate(slot, 0)
        for node in reversed(nodes):
            if node.children or self._pages.num_holders(node.page_id) > 1:
                break
            freed += self.index.drop(node)
        return freed

    def page_use(self) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the kv pages that busy slots hold, and those that only idle ones do."""
        idle_slots = tuple(slot.is_idle for slot in self._slots)
        at = (self._pages.num_changes, self._num_handed, idle_slots)
        use = self._use
        if use is None or use.at != at:
            held = (s.pages for s in self._slots if not s.is_idle)
            busy = frozenset(p for pages in (*held, *self._outside()) for p in pages)
            idle = frozenset(p for s in self._slots if s.is_idle for p in s.pages) - busy
            use = self._use = _PageUse(at, busy, idle)
        return use.busy, use.idle

    def window_page_use(self) -> tuple[int, int]:
        """Returns how many swa pages busy slots hold, and how many only idle ones do."""
        busy = {p for s in self._slots if not s.is_idle for p in s.window.page_ids if p}
        idle = {p for s in self._slots if s.is_idle for p in s.window.page_ids if p}
        return len(busy), len(idle - busy)

    def hold(self, page_ids: Sequence[int], *, shared: bool = False) -> Holding:
        """Becomes the holder of allocated pages or, if they are `shared`, one more holder."""
        if shared:
            self._pages.share(page_ids)
        held = Holding(list(page_ids))
        self._num_handed += 1
        self.holdings.append(held)
        return held

    def take(self, held: Holding) -> list[int]:
        """Ends a holding without giving its pages back: the caller holds them now."""
        self._num_handed += 1
        self.holdings.remove(held)
        return held.pages

    def drop(self, held: Holding) -> None:
        """Ends a holding, if it has not ended yet, and gives its pages back."""
        if held in self.holdings:
            self._pages.release(self.take(held))

    def evict_one(self, *, besides: Slot | None = None) -> bool:
        """Empties the least recently used idle slot that holds pages; False if there is none."""
        candidates = [s for s in self._slots if s.is_idle and s.pages and s is not besides]
        if not candidates:
            return False
        self.truncate(_least_recent(candidates), 0)
        return True

    def empty_all(self) -> None:
        """Empties every slot and the prefix index: no page holds anything any more."""
        self.index.clear()
        for held in list(self.holdings):
            self.drop(held)
        for checkpoint in self.checkpoints.all():
            checkpoint.drop()
        for slot in self._slots:
            slot.nodes.clear()
            self.truncate(slot, 0)

    def check_integrity(self) -> None:
        """Proves that every page has the holder that it should have.

        Raises:
            PoolCorruption: a page leaked, or a slot's pages do not fit its tokens.
        """
        self.index.check_integrity()
        held = [slot.pages for slot in self._slots]
        self._pages.check_integrity([*held, *self._outside(), self.index.held_pages()])
        if self._windows:
            self._windows.check_integrity((slot.window, len(slot.tokens)) for slot in self._slots)
        if self.states:
            self.states.check_integrity(self.checkpoints.held_states())
        self._check_roots()
        for slot in self._slots:
            self._check_nodes(slot)
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

    def is_held_outside(self, page_id: int) -> bool:
        """Whether a page is held for a slot that does not have it now."""
        return any(page_id in held.pages for held in self.holdings)

    def _outside(self) -> list[list[int]]:
        return [held.pages for held in self.holdings]

    def _vouches(self, index: int, slot: Slot) -> bool:
        """Whether the slot still holds all tokens of one of its listed pages."""
        return index * self.page_tokens + slot.nodes[index].num_tokens <= len(slot.tokens)

    def _keep(self, slot: Slot, checkpoint: Checkpoint) -> None:
        last = max(checkpoint.position - 1, 0) // self.page_tokens
        for node in slot.nodes[last : last + 1]:
            for other in node.checkpoints:
                if other.position == checkpoint.position:
                    self.checkpoints.touch(other)
                    return
        self.checkpoints.add(checkpoint)
        if not self.index.attach(slot.nodes, checkpoint):
            checkpoint.drop()

    def _check_roots(self) -> None:
        """No page serves two tenants, two adapter sets or two types of keys."""
        owners: dict[int, PrefixRoot] = {}
        listed = ((root, [page_id]) for root, page_id in self.index.listed_pages())
        held = ((slot.root, slot.pages) for slot in self._slots if slot.root)
        for root, page_ids in (*listed, *held):
            for page_id in page_ids:
                if owners.setdefault(page_id, root) != root:
                    raise PoolCorruption(f"page {page_id} serves {root} and {owners[page_id]}")

    def _check_nodes(self, slot: Slot) -> None:
        for index, node in enumerate(slot.nodes):
            if node.page_id != slot.pages[index] or not self._vouches(index, slot):
                raise PoolCorruption(f"page {index} of slot {slot.slot_id} is listed as another")

    def _most_similar(
        self, idle: list[Slot], prompt: Sequence[int], root: PrefixRoot
    ) -> Slot | None:
        if self._similarity == 0 or not prompt:
            return None
        best, best_share = None, self._similarity
        for slot in idle:
            if slot.root != root:
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


def _last_checkpoint(slot: Slot) -> int:
    """The last position at which the slot's sequence has a checkpoint, 0 if there is none."""
    for node in reversed(slot.nodes):
        if node.checkpoints:
            return max(checkpoint.position for checkpoint in node.checkpoints)
    return 0


def _least_recent(slots: list[Slot]) -> Slot:
    return min(slots, key=lambda slot: (slot.last_used, -slot.slot_id))
