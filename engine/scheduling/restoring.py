"""What a restore fills: pages and states that nothing refers to until the whole file proved right.

All of it runs on the engine thread, between steps. Knows neither the file nor who wished for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import TypeVar

import numpy as np

from engine.errors import EngineError, KvPagesExhausted
from engine.memory.checkpoint import Checkpoint
from engine.memory.planner import pages_for
from engine.memory.prefix_index import PrefixRoot
from engine.scheduling.reading import ContentLost, places_of, portions
from engine.scheduling.room import Room
from engine.slots.engine_calls import EngineCalls
from engine.slots.manifest import AdapterMark
from engine.slots.reader import VerifiedSlot
from engine.slots.state_layout import Content, Mark, PagePiece, Piece, StatePiece
from engine.slots.table import Holding, Slot, SlotTable
from engine.slots.window import WindowHeld
from engine.step import DeviceStore, PageContent, PoolLost, StateContent
from engine.types import PoolKind

Result = TypeVar("Result")


@dataclass(frozen=True)
class TransferParts:
    """What transfers are given.

    `calls` reaches the engine thread, `start` runs file work on another. `root_of` is what the
    prefixes of a tenant begin with under a set of adapters. `on_pool_lost` is told when the device
    lost its pools.
    """

    store: DeviceStore
    calls: EngineCalls
    start: Callable[[Callable[[], None]], None]
    clock: Callable[[], float]
    as_engine_error: Callable[[Exception], EngineError]
    root_of: Callable[[str, tuple[AdapterMark, ...]], PrefixRoot]
    on_pool_lost: Callable[[], None]

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Has work done by the engine thread, which hears of it if the pools go with it."""
        return self.calls.call(partial(self.watched, work))

    def watched(self, work: Callable[[], Result]) -> Result:
        """Does work, on the engine thread, and tells it if the pools went with it."""
        try:
            return work()
        except PoolLost:
            self.on_pool_lost()
            raise


class Target:
    """Room for a restored state, which becomes the slot's in `commit`; see `RestoreTarget`.

    Pages are filled as they come. States wait in host memory: a pool may have none to spare beside
    the slots' own, and there are few of them.
    """

    def __init__(self, parts: TransferParts, table: SlotTable, room: Room, slot: Slot) -> None:
        self._parts = parts
        self._table = table
        self._room = room
        self._slot = slot
        self._holding: Holding | None = None
        self._checkpoints: list[Checkpoint] = []
        self._states: dict[int, StateContent] = {}
        # The page, by its pool and place, in which the last piece ended, and what it holds so far.
        self._tail: tuple[tuple[PoolKind, int], PageContent] | None = None

    def reserve(self, slot: VerifiedSlot, *, may_evict: bool) -> Future[bool]:
        """Takes pages, on the engine thread; see `RestoreTarget`."""
        return self._parts.call(partial(self._reserve, slot, may_evict))

    def fill(self, piece: Piece, content: Content) -> Future[None]:
        """Takes a piece, on the engine thread; see `RestoreTarget`."""
        return self._parts.call(partial(self._fill, piece, content))

    def commit(self, restored: VerifiedSlot) -> None:
        """Gives the slot the restored state in place of its own, and lists it for the others.

        Raises whatever the device raises; the slot is empty then.
        """
        held, slot, table = self._check(), self._slot, self._table
        older = self._checkpoints[:-1]
        table.truncate(slot, 0)
        if not restored.tokens:
            table.drop(held)
            return
        self._write_own_state(len(restored.tokens))
        window = WindowHeld()
        if table.windows is not None:
            table.windows.adopt(window, self._checkpoints[-1], len(restored.tokens))
        table.adopt(
            slot,
            self._parts.root_of(restored.tenant, restored.adapters),
            restored.tokens,
            table.take(held),
            window,
            [Checkpoint(c.position, c.lowest, c.first_page, c.window_pages) for c in older],
            marked_from=restored.moved_from,
        )
        for checkpoint in self._checkpoints:
            checkpoint.drop()
        self._checkpoints = []
        self._list_snapshots()

    def give_back(self) -> None:
        """Frees what was reserved."""
        held, self._holding = self._holding, None
        if held in self._table.holdings:
            self._table.drop(held)
        for checkpoint in self._checkpoints:
            if checkpoint in self._table.checkpoints:
                checkpoint.drop()
        self._checkpoints = []
        self._states = {}

    def _reserve(self, restored: VerifiedSlot, may_evict: bool) -> bool:
        num_pages = pages_for(len(restored.tokens), self._table.page_tokens)
        marks = self._windows_with_room(restored.marks)
        places = sorted({place for held in marks.values() for place in held})
        taken = self._room.reserve(num_pages, len(places), self._slot, may_evict=may_evict)
        if taken is None:
            return False
        self._holding = self._table.hold(taken.pages)
        self._hold_windows(marks, dict(zip(places, taken.window_pages, strict=True)))
        return True

    def _windows_with_room(self, marks: Sequence[Mark]) -> dict[Mark, range]:
        """The windows, by their places, of the end and of the newest of the earlier marks.

        Nobody needs those, so they are left out as far as other slots would lose theirs for them.
        """
        windows, page_tokens = self._table.windows, self._table.page_tokens
        if windows is None:
            return {}
        room = self._room.window_room(self._slot, may_evict=False)
        kept: dict[Mark, range] = {}
        places: set[int] = set()
        for mark in reversed(marks):
            span = mark.span(windows.policy.window)
            window = range(span.start // page_tokens, pages_for(span.end, page_tokens))
            places.update(window)
            if kept and len(places) > room:
                break
            kept[mark] = window
        return dict(reversed(kept.items()))

    def _hold_windows(self, marks: dict[Mark, range], page_ids: dict[int, int]) -> None:
        """Window pages are held by checkpoints: running rows come first and may take them."""
        windows = self._table.windows
        if windows is None:
            return
        for mark, window in marks.items():
            checkpoint = Checkpoint(
                position=mark.position,
                lowest=mark.lowest,
                first_page=window.start,
                window_pages=tuple(page_ids[place] for place in window),
            )
            self._table.checkpoints.add(checkpoint)
            self._checkpoints.append(checkpoint)
        windows.pages.release(list(page_ids.values()))

    def _fill(self, piece: Piece, content: Content) -> None:
        held = self._check()
        if isinstance(piece, StatePiece):
            assert isinstance(content, StateContent)
            self._states[piece.position] = content
            return
        assert isinstance(content, PageContent)
        places = places_of(piece, self._table)
        page_tokens, store = self._table.page_tokens, self._parts.store
        content = self._whole_pages(piece, content, places)
        if piece.kind is PoolKind.KV:
            page_ids = held.pages[places.start : places.stop]
        else:
            windows = self._window_pages()
            is_held = [place in windows for place in places]
            page_ids = [windows[place] for place in compress(places, is_held)]
            content = _of_pages(content, is_held, page_tokens)
        for index, ids in enumerate(portions(page_ids, store)):
            start = index * store.transfer_pages * page_tokens
            part = slice(start, start + len(ids) * page_tokens)
            pages = PageContent(content.keys[:, part], content.values[:, part])
            store.write_pages(piece.kind, ids, pages)

    def _whole_pages(self, piece: PagePiece, content: PageContent, places: range) -> PageContent:
        """A piece from the start of its first page on, in which the piece before it may end.

        That page is written anew, so that what it holds is kept.
        """
        page_tokens, tail = self._table.page_tokens, self._tail
        content = _padded(content, piece.span.start - places.start * page_tokens)
        if tail is not None and tail[0] == (piece.kind, places.start):
            content.keys[:, : tail[1].num_tokens] = tail[1].keys
            content.values[:, : tail[1].num_tokens] = tail[1].values
        self._tail = None
        if piece.span.end % page_tokens:
            last = slice((len(places) - 1) * page_tokens, None)
            left = PageContent(content.keys[:, last].copy(), content.values[:, last].copy())
            self._tail = (piece.kind, places[-1]), left
        return content

    def _write_own_state(self, position: int) -> None:
        if self._table.states is not None:
            self._parts.store.write_state(self._slot.state_id, self._states.pop(position))

    def _list_snapshots(self) -> None:
        """Keeps the states of earlier positions as snapshots, as far as the pool has any."""
        states, self._states = self._states, {}
        for position, content in states.items():
            checkpoint = self._table.snapshot(self._slot, position)
            if checkpoint is None:
                continue
            try:
                self._parts.store.write_state(checkpoint.state_id, content)
            except BaseException:
                checkpoint.drop()
                self._table.truncate(self._slot, 0)
                raise

    def _check(self) -> Holding:
        """Returns the holding, which must still be whole.

        Raises:
            ContentLost: The device lost it.
            KvPagesExhausted: Running rows needed the window pages of its end.
        """
        held = self._holding
        if held is None or held not in self._table.holdings:
            raise ContentLost("the reserved pages were lost while the slot was restored")
        kept = [c for c in self._checkpoints if c in self._table.checkpoints]
        if kept[-1:] != self._checkpoints[-1:]:
            raise KvPagesExhausted(len(self._checkpoints[-1].window_pages), 0)
        for checkpoint in kept:  # the end last, so that it goes last
            self._table.checkpoints.touch(checkpoint)
        self._checkpoints = kept
        return held

    def _window_pages(self) -> dict[int, int]:
        """The swa pages that are still held, by their places in the sequence."""
        held = (enumerate(c.window_pages, c.first_page) for c in self._checkpoints)
        return {place: page_id for pages in held for place, page_id in pages}


def _padded(content: PageContent, num_before: int) -> PageContent:
    """Content that begins inside a page, with zeros before it: nobody may look there."""
    if not num_before:
        return content
    widths = ((0, 0), (num_before, 0), (0, 0), (0, 0))
    return PageContent(np.pad(content.keys, widths), np.pad(content.values, widths))


def _of_pages(content: PageContent, is_held: Sequence[bool], page_tokens: int) -> PageContent:
    """The tokens of those pages of some content that are held."""
    if all(is_held):
        return content
    tokens = np.repeat(is_held, page_tokens)[: content.num_tokens]
    return PageContent(content.keys[:, tokens], content.values[:, tokens])
