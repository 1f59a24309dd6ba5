"""Saved slots within a simulated life: wishes are drawn, disks fail, and every file is looked into."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.errors import EngineError
from engine.memory.planner import MemoryPlan
from engine.requests import AdapterScale, Request
from engine.scheduling.reading import ContentLost
from engine.scheduling.wishes import Restore, RestoredSlot, Save, SavedSlot
from engine.slots.errors import DiskFull, SlotFileNotFound, SlotIo
from engine.slots.folder import SlotFolder, own_name
from engine.slots.reader import VerifiedSlot, open_slot
from engine.slots.state_layout import PagePiece
from engine.step import PageContent, StateContent
from engine.types import SlotInfo, SlotState, Snapshot
from tests.fake_logits import history_of, letters_of, set_number, tokens_of
from tests.fake_runner import FakeRunner
from tests.slot_stores import fake_store, restore_wish, save_wish
from tests.unit.engine.lockstep import FileThread

_TENANTS = ("", "a")
_NAMES = ("x", "y")


@dataclass(frozen=True)
class _BrokenFolder(SlotFolder):
    """A folder on a disk that fails."""

    error: EngineError = field(default_factory=lambda: DiskFull("x"))

    def create(self, filename: str, size_bytes: int = 0) -> Any:
        raise self.error

    def open(self, filename: str) -> Any:
        raise self.error


@dataclass(eq=False)
class _Asked:
    """A wish, and the request that computes its prompt, if it has one."""

    wish: Save | Restore
    tenant: str
    request: Request | None = None


class SlotLife:
    """Asks for saves and restores, and proves what becomes of them.

    `tenants` says whose content a slot holds, `marked` which slots may hold what was moved; both
    are the simulation's books too.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.tenants: dict[int, str] = {}
        self.marked: set[int] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-slots-")
        self._threads: list[FileThread] = []
        self._is_free = False
        self._asked: list[_Asked] = []
        self._marked_files: set[tuple[str, str]] = set()
        # What was restored belongs to the file's owner, whoever was served by the slot last.
        self._owners: dict[tuple[int, int], str] = {}
        self._last: dict[int, Request | None] = {}
        self._restored: set[int] = set()
        self._before: dict[int, str | None] = {}

    def attach(self, engine: Engine, runner: FakeRunner, plan: MemoryPlan) -> None:
        """Gives it the engine whose slots they are."""
        self._engine = engine
        self._store = fake_store(
            Path(self._folder.name), runner, plan, adapters=lambda: engine.snapshot().adapters
        )

    # File work.

    def start(self, work: Callable[[], None]) -> None:
        """Runs file work, on a thread that goes on in `work`."""
        if self._is_free:
            threading.Thread(target=work, daemon=True).start()
        else:
            self._threads.append(FileThread(work))

    def work(self) -> None:
        """Files get on, or not."""
        for thread in list(self._threads):
            if thread.can_go and self.rng.random() < 0.6:
                thread.go()
            if thread.has_ended:
                self._threads.remove(thread)

    # Commands.

    def command(self, draw_request: Callable[[], Request]) -> Request | None:
        """Asks for something; a request that is to be warmed is the caller's to submit."""
        draw = self.rng.random()
        if draw < 0.35:
            self._transfer(self._save())
        elif draw < 0.65:
            self._transfer(self._restore())
        elif draw < 0.85:
            return self._warm(draw_request())
        elif draw < 0.93 and self._asked:
            self.rng.choice(self._asked).wish.done.cancel()
        else:
            self._spoil()
        return None

    def take_save(self, request: Request) -> Save | None:
        """The save that a warming request is for."""
        asked = next((each for each in self._asked if each.request is request), None)
        return asked.wish if asked and isinstance(asked.wish, Save) else None

    def _transfer(self, asked: _Asked) -> None:
        self._asked.append(asked)
        self._engine.transfer_slot(asked.wish)

    def _save(self) -> _Asked:
        rng, tenant = self.rng, self.rng.choice(_TENANTS)
        wish = save_wish(self._store, self._slot_id(), rng.choice(_NAMES), tenant=tenant)
        wish.fail_if_busy = rng.random() < 0.2
        if rng.random() < 0.1:
            wish.order = replace(wish.order, folder=self._broken(tenant))
        wish.done.add_done_callback(lambda done: self._on_saved(wish, tenant, done))
        return _Asked(wish, tenant)

    def _restore(self) -> _Asked:
        rng, tenant = self.rng, self.rng.choice(_TENANTS)
        wish = restore_wish(self._store, self._slot_id(), rng.choice(_NAMES), tenant=tenant)
        wish.fail_if_busy = rng.random() < 0.2
        if rng.random() < 0.1:
            wish.order = replace(wish.order, folder=self._broken(tenant))
        wish.done.add_done_callback(lambda done: self._on_restored(wish, tenant, done))
        return _Asked(wish, tenant)

    def _warm(self, request: Request) -> Request | None:
        if not request.prompt:
            return None
        asked = self._save()
        asked.request = replace(
            request,
            is_warming=True,
            max_tokens=0,
            slot_id=asked.wish.slot_id,
            tenant=asked.tenant,
        )
        self._asked.append(asked)
        return asked.request

    def forget(self, request: Request) -> None:
        """A warming request was refused: nobody hears of its save."""
        self._asked = [each for each in self._asked if each.request is not request]

    def _slot_id(self) -> int:
        """Mostly one that holds something."""
        slots = self._engine.snapshot().slots
        held = [slot.slot_id for slot in slots if slot.held_tokens]
        return self.rng.choice(held if held and self.rng.random() < 0.7 else range(len(slots)))

    def _broken(self, tenant: str) -> SlotFolder:
        error = self.rng.choice([DiskFull("x"), SlotIo("x", 5, "Input/output error")])
        return _BrokenFolder(self._folder.name, tenant, error=error)

    def _spoil(self) -> None:
        """Deletes a file, or flips a bit of it."""
        folder = SlotFolder(self._folder.name, self.rng.choice(_TENANTS))
        files = folder.list()
        if not files:
            return
        name = self.rng.choice(files).filename
        if self.rng.random() < 0.5:
            folder.delete(name)
            return
        inside = f".tenant-{folder.tenant}" if folder.tenant else ""
        path = Path(self._folder.name, inside, name)
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(bytes(data))

    # Judgement.

    def note_start(self, slot_id: int, *, is_own: bool) -> None:
        """A request begins in a slot, and goes on from what that holds if `is_own`."""
        if slot_id in self._restored:
            self._restored.discard(slot_id)
            self.seen["reused:restored"] += is_own

    def owners_of(self, slot_id: int) -> set[str | None]:
        """Whose content a slot may hold in this step: what was on a shelf may have come back."""
        return {self.tenants[slot_id], self._before.get(slot_id)}

    def tenant_of(self, slot: SlotInfo) -> str | None:
        """Whose content a slot holds, None if nobody was ever served there."""
        # A request without a prompt says nothing of the content, which may be back from the shelf.
        is_new = slot.request is not self._last.get(slot.slot_id)
        if is_new and slot.request is not None and slot.request.prompt:
            is_warming = slot.request.is_warming
            self._before[slot.slot_id] = self.tenants.get(slot.slot_id) if is_warming else None
        self._last[slot.slot_id] = slot.request
        if slot.state in (SlotState.PREFILL, SlotState.DECODE):
            # Who was pre-empted before a restore, and goes on here, has brought its own content.
            self._owners.pop((slot.slot_id, id(slot.request)), None)
        owner = self._owners.get((slot.slot_id, id(slot.request)))
        if owner is not None:
            return owner
        return slot.request.tenant if slot.request and slot.request.prompt else None

    def _on_saved(self, wish: Save, tenant: str, done: Future[SavedSlot]) -> None:
        saved = self._outcome(done, "save")
        if saved is None:
            return
        self.seen["saved" if saved.tokens else "saved:nothing"] += 1
        name = (tenant, wish.order.filename)
        if wish.slot_id in self.marked:
            self._marked_files.add(name)
        else:
            self._marked_files.discard(name)
        self._look_into(wish.order.folder, wish.order.filename)

    def _on_restored(self, wish: Restore, tenant: str, done: Future[RestoredSlot]) -> None:
        restored = self._outcome(done, "restore")
        if restored is None:
            return
        self.seen["restored" if restored.tokens else "restored:nothing"] += 1
        slot_id = restored.slot_id
        self._owners[slot_id, id(self._last.get(slot_id))] = self.tenants[slot_id] = tenant
        self._restored.add(slot_id)
        # Another save may have replaced the file since it was read.
        if self._marked_files:
            self.marked.add(slot_id)

    def _outcome(self, done: Future[Any], what: str) -> Any:
        if done.cancelled():
            self.seen[f"{what}:cancelled"] += 1
            return None
        error = done.exception()
        if error is None:
            return done.result()
        assert isinstance(error, EngineError), error
        assert not isinstance(error.__cause__, AssertionError), error.__cause__
        self.seen[f"{what}:{error.reason}"] += 1
        if isinstance(error.__cause__, ContentLost):
            self.seen[f"{what}:lost"] += 1
        return None

    def _look_into(self, folder: SlotFolder, filename: str) -> int | None:
        """Proves that a file holds what its tokens say; returns how many those are."""
        order = self._store.restore_order(filename, folder.tenant, self._fingerprint)
        accepted = replace(order.accepted, scales_of=_any_scales, tenant=None)
        try:
            with open_slot(folder, filename) as slot:
                return self._check(slot.verify(accepted, self._fingerprint))
        except SlotFileNotFound:
            return None

    @property
    def _fingerprint(self) -> str:
        return self._store.identity.fingerprint(0)

    def _check(self, slot: VerifiedSlot) -> int:
        held: list[int] = []
        for piece in slot.pieces:
            content = slot.read(piece)
            if isinstance(content, StateContent):
                assert not isinstance(piece, PagePiece)
                assert history_of(content) == held[: piece.position], "another place's state"
                continue
            assert isinstance(piece, PagePiece)
            assert isinstance(content, PageContent)
            found = tokens_of(content).tolist()
            span = slice(piece.span.start, piece.span.end)
            if len(held) == piece.span.start:
                held += found
            assert found == held[span], "the window holds other tokens"
        assert letters_of(held) == list(slot.tokens), "what was saved is not what was held"
        if slot.adapters and slot.moved_from is None:
            marks = ((bytes.fromhex(mark.content), mark.scale) for mark in slot.adapters)
            number = set_number(marks)
            assert held == [token + (number << 10) for token in slot.tokens]
        return len(held)

    # Rest.

    def is_at_rest(self, unfinished: Callable[[Request], bool]) -> bool:
        """Whether every wish has its outcome; `unfinished` requests never come to their save."""
        waiting = (each for each in self._asked if not each.wish.done.done())
        return not self._threads and all(
            each.request is not None and unfinished(each.request) for each in waiting
        )

    def stop(self) -> None:
        """Stops the engine as a server with autosave does, and looks into every file."""
        self._is_free = True
        engine, slots = self._engine, self._engine.snapshot().slots
        assert all(slot.state is SlotState.IDLE for slot in slots)
        saves: list[Save] = []
        for slot in slots:
            order = self._store.autosave_order(slot.slot_id, self._fingerprint)
            saves.append(Save(slot.slot_id, order, outlives_stop=True))
            engine.transfer_slot(saves[-1])
        engine.stop(grace_s=60.0)
        for slot, save in zip(slots, saves, strict=True):
            assert save.done.result(0).tokens == slot.held_tokens
        folder = SlotFolder(self._folder.name)
        own = {slot.slot_id: own_name(slot.slot_id, self._fingerprint) for slot in slots}
        assert folder.list_own(self._fingerprint) == own
        self._folder.cleanup()
        self.seen["autosaved"] += sum(slot.held_tokens > 0 for slot in slots)


def is_in_transfer(now: Snapshot) -> bool:
    """Whether a slot is busy with a file."""
    return any(slot.state is SlotState.TRANSFER for slot in now.slots)


def _any_scales(marks: object) -> tuple[AdapterScale, ...]:
    return ()
