"""The longest proven prefix of a request, and how a slot gets it.

Looks in the slot itself, then in the prefix index, whose pages may lie on the device or on the
host. Whole pages are shared; the page in which a sequence goes its own way is copied first, on the
device. Knows no queue and no row, and takes no page that it was not told to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.memory.checkpoint import Checkpoint
from engine.memory.pages import SINK_PAGE, PageAllocator
from engine.memory.prefix_index import Match, PageNode, PrefixRoot, encode
from engine.requests import Request
from engine.slots.moves import SlotMoves, moved_chunks
from engine.slots.table import Slot, SlotTable, common_prefix
from engine.step import Runner
from engine.types import CacheSource, PoolKind


def prefix_root(
    request: Request, adapters: bytes = b"", *, model: bytes, kv_dtype: str
) -> PrefixRoot:
    """Returns what a request's prefixes start from: the one place that decides it.

    `adapters` is the prefix key of its effective set.
    """
    return PrefixRoot(model=model, kv_dtype=kv_dtype, adapters=adapters, tenant=request.tenant)


@dataclass(frozen=True)
class Reuse:
    """How many leading tokens of a prompt need no evaluation, where they lie, and why none if 0.

    `nodes` hold them unless `is_own`: then the slot does already, and `is_cut` says that it holds
    more. `checkpoint` gives the window pages, or the state, that go with `nodes`. `shared` are the
    kv pages on the device that the slot will hold as they are, `copied` the one whose beginning is
    copied (0: none). `moved` are positions in the slot whose tokens continue the prefix once they
    are moved there.
    """

    num_tokens: int
    source: CacheSource = CacheSource.NONE
    no_reuse: str = ""
    is_own: bool = False
    is_cut: bool = False
    nodes: tuple[PageNode, ...] = ()
    checkpoint: Checkpoint | None = None
    shared: tuple[int, ...] = ()
    copied: int = 0
    moved: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All tokens that need no evaluation."""
        return self.num_tokens + len(self.moved)


class Prefixes:
    """Finds prefixes and puts them into slots."""

    def __init__(self, table: SlotTable, pages: PageAllocator, store: Runner) -> None:
        self._table = table
        self._pages = pages
        self._index = table.index
        self._host = table.index.host_tier
        self._store = store
        self.moves = SlotMoves(table, pages, store)

    def find(
        self,
        slot: Slot,
        root: PrefixRoot,
        request: Request,
        prompt: Sequence[int],
        *,
        limit: int | None = None,
    ) -> Reuse:
        """Returns the longest prefix that an idle slot can have.

        The slot's own goes before one that is less than a page, and less than twice, as long: it
        need not be moved, and who names a slot counts on what that holds. It has at most `limit`
        tokens (None: any number).

        At least one token is left to evaluate, because its logits are needed: the same prompt
        again reuses all but one.
        """
        if not request.cache_prompt:
            return Reuse(0, no_reuse="the request turned prompt caching off")
        is_whole = limit is None
        limit = len(prompt) - 1 if limit is None else min(limit, len(prompt) - 1)
        own = self._own(slot, root, prompt, limit)
        if own.num_tokens == limit:
            return own
        if is_whole and request.n_cache_reuse and slot.root == root:
            own = self._with_moved(slot, own, prompt[:limit], request.n_cache_reuse)
        listed = self._listed(self._index.match(root, encode(prompt)), limit)
        is_much = listed.num_tokens >= max(1, 2 * own.total)
        if is_much or listed.num_tokens >= own.total + self._table.page_tokens:
            return listed
        if own.moved:
            return own
        if not own.num_tokens and listed.no_reuse:
            return listed
        return own

    def cut(self, slot: Slot, reuse: Reuse) -> Reuse:
        """Returns the same prefix without the page that it would have to copy."""
        whole = reuse.num_tokens // self._table.page_tokens * self._table.page_tokens
        if reuse.is_own:
            return self._own_cut(slot, whole)
        return self._at(Match(reuse.nodes, reuse.num_tokens), whole)

    def put(self, slot: Slot, root: PrefixRoot, reuse: Reuse, prompt: Sequence[int]) -> None:
        """Makes an idle slot hold the prefix and nothing else; the pages for it must be free.

        Raises whatever the device raises; the slot is empty then.
        """
        try:
            if reuse.is_own:
                self._cut_own(slot, reuse)
            else:
                self._adopt(slot, reuse)
            slot.tokens[:] = prompt[: reuse.num_tokens]
            slot.root = root
        except BaseException:
            self._table.truncate(slot, 0)
            raise

    # The slot's own content.

    def _own(self, slot: Slot, root: PrefixRoot, prompt: Sequence[int], limit: int) -> Reuse:
        if not slot.tokens:
            return Reuse(0, no_reuse="the slot is empty")
        if slot.tenant != root.tenant:
            return Reuse(0, no_reuse="the slot's content is another tenant's")
        if slot.root != root:
            return Reuse(0, no_reuse="the slot's content was made under other adapters")
        shared = min(common_prefix(slot.tokens, prompt), limit)
        if not shared:
            return Reuse(0, no_reuse="the slot shares no prefix with the prompt")
        return self._own_cut(slot, shared)

    def _with_moved(self, slot: Slot, own: Reuse, prompt: Sequence[int], least: int) -> Reuse:
        """The slot's own prefix and what of the rest it holds elsewhere, where keys can be moved."""
        if not self._store.can_move_tokens:
            return own
        moved = moved_chunks(slot.tokens, prompt, start=own.num_tokens, least=least)
        if not moved:
            return own
        return Reuse(own.num_tokens, CacheSource.SLOT, is_own=True, moved=tuple(moved))

    def _own_cut(self, slot: Slot, num_tokens: int) -> Reuse:
        windows = self._table.windows
        if windows and not windows.can_continue(slot.window, num_tokens):
            return Reuse(0, no_reuse=_window_gone(num_tokens))
        checkpoint = None
        if self._table.states and num_tokens < len(slot.tokens):
            wanted = num_tokens
            num_tokens, checkpoint = _continuation(slot.nodes, wanted)
            if checkpoint is None:
                return Reuse(0, no_reuse=_state_gone(wanted))
        if not num_tokens:
            return Reuse(0)
        whole, rest = divmod(num_tokens, self._table.page_tokens)
        shared, copied = list(slot.pages[:whole]), 0
        if rest and self._is_read_behind(slot, num_tokens):
            copied = slot.pages[whole]
        elif rest:
            shared.append(slot.pages[whole])
        return Reuse(
            num_tokens,
            CacheSource.SLOT,
            is_own=True,
            is_cut=num_tokens < len(slot.tokens),
            nodes=tuple(slot.nodes[: whole + bool(rest)]) if checkpoint else (),
            checkpoint=checkpoint,
            shared=tuple(shared),
            copied=copied,
        )

    def _is_read_behind(self, slot: Slot, num_tokens: int) -> bool:
        """Behind the end of its tokens a slot may write on; within them others may read.

        What is on a shelf may come back and be written on from there: then all of it is within.
        """
        page_id = slot.pages[num_tokens // self._table.page_tokens]
        is_cut = num_tokens < len(slot.tokens) and self._pages.num_holders(page_id) > 1
        return is_cut or self._table.is_held_outside(page_id)

    def _cut_own(self, slot: Slot, reuse: Reuse) -> None:
        self._table.truncate(slot, reuse.num_tokens)
        if reuse.copied:
            self._copy_last(PoolKind.KV, self._pages, slot.pages)
            del slot.nodes[reuse.num_tokens // self._table.page_tokens :]
        windows, rest = self._table.windows, reuse.num_tokens % self._table.page_tokens
        if windows and rest and (reuse.is_cut or reuse.copied):
            self._copy_last_window(slot)
        self._adopt_state(slot, reuse)

    # What the index holds.

    def _listed(self, match: Match, limit: int) -> Reuse:
        shared = min(match.num_tokens, limit)
        if not shared:
            return Reuse(0)
        return self._at(match, shared)

    def _at(self, match: Match, num_tokens: int) -> Reuse:
        checkpoint = None
        if self._table.windows or self._table.states:
            wanted = num_tokens
            num_tokens, checkpoint = _continuation(match.nodes, wanted)
            if checkpoint is None:
                gone = _window_gone if self._table.windows else _state_gone
                return Reuse(0, no_reuse=gone(wanted))
        if not num_tokens:
            return Reuse(0)
        whole, rest = divmod(num_tokens, self._table.page_tokens)
        nodes = match.nodes[: whole + bool(rest)]
        is_lifted = any(node.is_on_host for node in nodes)
        return Reuse(
            num_tokens,
            CacheSource.HOST if is_lifted else CacheSource.INDEX,
            nodes=nodes,
            checkpoint=checkpoint,
            shared=tuple(node.page_id for node in nodes[:whole] if not node.is_on_host),
            copied=nodes[whole].page_id if rest else 0,
        )

    def _adopt(self, slot: Slot, reuse: Reuse) -> None:
        whole = reuse.num_tokens // self._table.page_tokens
        self._table.truncate(slot, 0)
        self._adopt_whole(slot, reuse.nodes[:whole])
        self._adopt_tail(slot, reuse.nodes[whole:])
        self._index.touch(reuse.nodes)
        if reuse.checkpoint is not None and self._table.windows:
            self._adopt_window(slot, reuse.checkpoint, reuse.num_tokens)
        self._adopt_state(slot, reuse)

    def _adopt_whole(self, slot: Slot, nodes: Sequence[PageNode]) -> None:
        device = [node for node in nodes if not node.is_on_host]
        self._pages.share([node.page_id for node in device])
        slot.pages += (node.page_id for node in device)
        slot.nodes += device
        # The host's pages continue those of the device.
        lifted = nodes[len(device) :]
        if not lifted:
            return
        page_ids = self._pages.allocate(len(lifted))
        slot.pages += page_ids
        self._host.write(page_ids, [node.content for node in lifted if node.content])
        for node, page_id in zip(lifted, page_ids, strict=True):
            self._index.lift(node, page_id)
        slot.nodes += lifted

    def _adopt_tail(self, slot: Slot, nodes: Sequence[PageNode]) -> None:
        for node in nodes:
            slot.pages += self._pages.allocate(1)
            if node.content is not None:
                self._host.write(slot.pages[-1:], [node.content])
            else:
                self._store.copy_pages(PoolKind.KV, [node.page_id], slot.pages[-1:])

    def _adopt_window(self, slot: Slot, checkpoint: Checkpoint, num_tokens: int) -> None:
        windows = self._table.windows
        assert windows is not None
        windows.adopt(slot.window, checkpoint, num_tokens)
        if num_tokens % self._table.page_tokens:
            self._copy_last_window(slot)

    def _adopt_state(self, slot: Slot, reuse: Reuse) -> None:
        """Makes the slot's state that of the checkpoint; without one it is that already."""
        if reuse.checkpoint is not None and reuse.checkpoint.state_id:
            self._store.copy_state(reuse.checkpoint.state_id, slot.state_id)
            self._table.checkpoints.touch(reuse.checkpoint)

    def snapshot(self, slot: Slot) -> None:
        """Keeps the slot's state, so that its sequence can be continued from here later.

        Raises whatever the device raises; then nothing is kept.
        """
        checkpoint = self._table.snapshot(slot, len(slot.tokens))
        if checkpoint is None:
            return
        try:
            self._store.copy_state(slot.state_id, checkpoint.state_id)
        except BaseException:
            checkpoint.drop()
            raise

    # Copies.

    def _copy_last_window(self, slot: Slot) -> None:
        windows = self._table.windows
        assert windows is not None
        if slot.window.page_ids[-1] == SINK_PAGE:
            return
        windows.reclaim(1)
        holders = windows.pages.num_holders(slot.window.page_ids[-1])
        if not windows.num_free and holders <= 2:
            return  # its checkpoint made room: besides the slot only the caller holds it, for now
        self._copy_last(PoolKind.SWA, windows.pages, slot.window.page_ids)

    def _copy_last(self, kind: PoolKind, pages: PageAllocator, held: list[int]) -> None:
        """Gives a holder its own copy of its last page, if others hold that too."""
        source = held[-1]
        if pages.num_holders(source) == 1:
            return
        held[-1:] = pages.allocate(1)
        try:
            self._store.copy_pages(kind, [source], held[-1:])
        finally:
            pages.release([source])


def _continuation(nodes: Sequence[PageNode], num_tokens: int) -> tuple[int, Checkpoint | None]:
    """The last position, up to `num_tokens`, at which a checkpoint lets a path be continued."""
    best, found = 0, None
    for node in nodes:
        for checkpoint in node.checkpoints:
            position = checkpoint.at(num_tokens)
            if position > best:
                best, found = position, checkpoint
    return best, found


def _window_gone(num_tokens: int) -> str:
    return f"the window before token {num_tokens} is no longer held"


def _state_gone(num_tokens: int) -> str:
    return f"the recurrent state after token {num_tokens}, or an earlier one, is no longer held"
