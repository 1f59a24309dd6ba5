"""The file side of saving and restoring a slot, on a thread of its own.

Pages and states are the engine thread's: it is asked for them piece by piece, a few ahead, so that
disk, hash and device work at the same time and the whole is never in host memory. Knows files, and
pages only as functions that it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine.slots.fingerprint import Traits
from engine.slots.folder import SlotFolder
from engine.slots.manifest import Manifest
from engine.slots.reader import Acceptance, VerifiedSlot, open_slot
from engine.slots.state_layout import Content, Piece
from engine.slots.writer import SlotWriter
from engine.step import PageContent, PageRead

# Pieces asked for ahead: while one is hashed and written, others are gathered.
_AHEAD = 3
# Threads that read and hash pieces of one file: two keep one another's waits for memory short.
_READERS = 2

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class SaveOrder:
    """Where a slot shall be saved, and by which model."""

    folder: SlotFolder
    filename: str
    fingerprint: str
    traits: Traits
    model_name: str


@dataclass(frozen=True)
class RestoreOrder:
    """Which file shall be restored, and what it has to fit."""

    folder: SlotFolder
    filename: str
    fingerprint: str
    accepted: Acceptance


class Gathered(Protocol):
    """What a piece holds, on its way to the host."""

    def wait(self) -> Content:
        """Returns it; raises whatever the device raises."""
        ...


@dataclass(frozen=True)
class GatheredPages:
    """Whole pages, of which `num_tokens` tokens behind the first `skip` are wanted."""

    reads: Sequence[PageRead]
    skip: int
    num_tokens: int

    def wait(self) -> PageContent:
        """Returns the wanted tokens."""
        contents = [read.wait() for read in self.reads]
        wanted = slice(self.skip, self.skip + self.num_tokens)
        return PageContent(
            _joined([content.keys for content in contents])[:, wanted],
            _joined([content.values for content in contents])[:, wanted],
        )


class TransferStopped(Exception):
    """Nobody waits for the transfer any more."""


class RestoreTarget(Protocol):
    """The engine's side of a restore: what nothing refers to until `commit`."""

    def reserve(self, slot: VerifiedSlot, *, may_evict: bool) -> Future[bool]:
        """Takes pages for all of the state; False if that needs others to lose theirs.

        The future raises KvPagesExhausted if running requests hold too many.
        """
        ...

    def fill(self, piece: Piece, content: Content) -> Future[None]:
        """Writes a piece into the reserved pages, or keeps a state until the end."""
        ...


def save(
    order: SaveOrder,
    manifest: Manifest,
    tokens: Sequence[int],
    gather: Callable[[Piece], Future[Gathered]],
    is_stopped: Callable[[], bool],
    tell: Callable[[int], None],
) -> None:
    """Writes a slot's file.

    Nothing is raised once `tell` was called: what is left then is to free the file of that name
    that was there before.

    Args:
        order: What and where.
        manifest: What the file says of the state.
        tokens: The tokens of the state.
        gather: Asks for the pages of a piece.
        is_stopped: Whether the caller has gone away; asked before each piece.
        tell: Gets the size of the file, in bytes, once it is safe under its name.

    Raises:
        EngineError: As `SlotWriter.open`; nothing of the file stays.
        TransferStopped: The caller has gone away; the same.
    """
    with SlotWriter.open(order.folder, order.filename, manifest, tokens) as writer:
        for piece, gathered in _ahead(manifest.pieces, gather):
            _check_stop(is_stopped)
            writer.add(piece, gathered.wait())
        _check_stop(is_stopped)
        tell(writer.publish())


def restore(
    order: RestoreOrder, target: RestoreTarget, is_stopped: Callable[[], bool]
) -> VerifiedSlot:
    """Reads a slot's file into reserved pages; all hashes were right when it returns.

    Raises:
        EngineError: The file is refused, or there are no pages.
        TransferStopped: The caller has gone away.
    """
    with open_slot(order.folder, order.filename) as unverified:
        slot = unverified.verify(order.accepted, order.fingerprint)
        if not target.reserve(slot, may_evict=False).result():
            # Others lose their pages for this state only once it is known to be whole.
            for piece in slot.pieces:
                _check_stop(is_stopped)
                slot.read(piece)
            target.reserve(slot, may_evict=True).result()
        with ThreadPoolExecutor(_READERS, "slot-read") as readers:
            filling: deque[Future[None]] = deque()
            for piece, content in _ahead(slot.pieces, lambda p: readers.submit(slot.read, p)):
                _check_stop(is_stopped)
                filling.append(target.fill(piece, content))
                if len(filling) > _AHEAD:
                    filling.popleft().result()
            for filled in filling:
                filled.result()
        return slot


def _ahead(
    items: Sequence[Item], ask: Callable[[Item], Future[Result]]
) -> Iterator[tuple[Item, Result]]:
    """Yields each item with its answer, asking for a few of them in advance."""
    asked: deque[tuple[Item, Future[Result]]] = deque()
    for item in items:
        asked.append((item, ask(item)))
        if len(asked) > _AHEAD:
            first, answer = asked.popleft()
            yield first, answer.result()
    for first, answer in asked:
        yield first, answer.result()


def _check_stop(is_stopped: Callable[[], bool]) -> None:
    if is_stopped():
        raise TransferStopped


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
