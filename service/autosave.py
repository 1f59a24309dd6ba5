"""Keeps what slots hold over the end of a model's time: saved then, restored when it serves again.

Each model has files of its own, so that one served in between leaves them alone. A convenience, never a reason to fail: whatever goes wrong is logged and the slot begins empty.
"""

from __future__ import annotations

import asyncio
import logging

from engine.engine import Engine
from engine.errors import EngineError
from engine.scheduling.wishes import Restore, Save
from engine.slots.errors import SlotFileNotFound
from engine.slots.store import SlotStore
from service.loaded import LoadedModel

# How long a model that another one replaces is kept for its slots' saves.
_LEAVING_S = 60.0
_LOG = logging.getLogger("kvarts.service")


class Autosave:
    """The saves of one model's end, and the restores of its beginning."""

    def __init__(self, engine: Engine, store: SlotStore) -> None:
        self._engine = engine
        self._store = store
        self._fingerprint = ""
        self._saves: list[Save] | None = None
        # Slots whose files are still to be restored, None before that is known.
        self._unrestored: set[int] | None = None

    def is_of(self, store: SlotStore) -> bool:
        """Whether it keeps the slots of that store's model."""
        return store is self._store

    async def restore(self) -> None:
        """Restores each slot that was saved and has not been used yet, in the background."""
        try:
            for error in await asyncio.to_thread(self._store.take_over):
                _LOG.warning("a slot of an earlier version is not restored: %s", error)
            if not await asyncio.to_thread(self._store.has_autosaved):
                self._unrestored = set()
                return
            with self._store.identity.waiting() as done:
                fingerprint = await asyncio.wrap_future(done)
            names = await asyncio.to_thread(self._store.autosaved, fingerprint)
        except EngineError as error:
            _LOG.warning("slots of the last run are not restored: %s", error)
            return
        self._unrestored = set(names)
        for slot_id, name in names.items():
            if self._saves is not None:
                return  # the end has come first: those that are left come back another time
            try:
                await self._restore(slot_id, name, fingerprint)
            except EngineError as error:
                _LOG.warning("slot %d of the last run is not restored: %s", slot_id, error)
            if self._saves is None:
                self._unrestored.discard(slot_id)

    def begin(self) -> list[Save]:
        """Asks the engine to save every slot once it is idle, before it is stopped.

        Asked for again, they are the same.
        """
        if self._saves is not None:
            return self._saves
        saves = self._saves = list[Save]()
        fingerprint = self._store.identity.known()
        if fingerprint is None:
            _LOG.warning("slots are not saved: the model's fingerprint is not known")
            return saves
        self._fingerprint = fingerprint
        for slot in self._engine.snapshot().slots:
            if self._is_unrestored(slot.slot_id) and not slot.request and not slot.held_tokens:
                continue  # an empty file would take the place of its own
            order = self._store.autosave_order(slot.slot_id, fingerprint)
            save = Save(slot.slot_id, order, outlives_stop=True)
            try:
                self._engine.transfer_slot(save)
            except EngineError as error:
                _LOG.warning("slots are not saved: %s", error)
                break
            saves.append(save)
        return saves

    async def end(self, saves: list[Save]) -> None:
        """Waits for them and tells what became of each; an engine that has stopped knows."""
        for save in saves:
            try:
                # Whoever stops waiting here stops no save: the engine's end does, if it must.
                saved = await asyncio.shield(asyncio.wrap_future(save.done))
            except EngineError as error:
                _LOG.warning("slot %d is not saved: %s", save.slot_id, error)
                continue
            if not saved.tokens:
                # An empty slot needs no file, and the one of an earlier run must not come back.
                await self._forget(save.slot_id, self._fingerprint)
                continue
            _LOG.info("slot %d: %d tokens saved", saved.slot_id, saved.tokens)

    def _is_unrestored(self, slot_id: int) -> bool:
        return self._unrestored is None or slot_id in self._unrestored

    async def _restore(self, slot_id: int, name: str, fingerprint: str) -> None:
        slots = self._engine.snapshot().slots
        if slot_id >= len(slots) or slots[slot_id].request or slots[slot_id].held_tokens:
            return
        order = self._store.restore_order(name, "", fingerprint, owns_all=True)
        restore = Restore(slot_id, order, fail_if_busy=True)
        self._engine.transfer_slot(restore)
        restored = await asyncio.wrap_future(restore.done)
        if self._unrestored:
            self._unrestored.discard(slot_id)
        if self._saves is None:  # else the file is, or soon will be, the one of this end
            await self._forget(slot_id, fingerprint)
        _LOG.info("slot %d: %d tokens of the last run", slot_id, restored.tokens)

    async def _forget(self, slot_id: int, fingerprint: str) -> None:
        try:
            await asyncio.to_thread(self._store.delete_autosave, slot_id, fingerprint)
        except SlotFileNotFound:
            return  # who began this and was cut off has done it
        except EngineError as error:
            _LOG.warning("the file of slot %d is not deleted: %s", slot_id, error)


class Autosaves:
    """Those of all models whose engine runs: the one that is served and those before it."""

    def __init__(self) -> None:
        self._each: list[Autosave] = []

    def add(self, engine: Engine, store: SlotStore) -> Autosave:
        """A model begins."""
        autosave = Autosave(engine, store)
        self._each.append(autosave)
        return autosave

    def remove(self, store: SlotStore) -> None:
        """A model's engine has stopped."""
        self._each = [one for one in self._each if not one.is_of(store)]

    async def leave(self, model: LoadedModel) -> None:
        """Saves the slots of a model that no call uses any more and whose engine still runs."""
        for autosave in self._each:
            if model.slot_store is None or not autosave.is_of(model.slot_store):
                continue
            try:
                async with asyncio.timeout(_LEAVING_S):
                    await autosave.end(autosave.begin())
            except TimeoutError:
                _LOG.warning("slots of the old model are not saved: it takes too long")

    def begin(self) -> list[tuple[Autosave, list[Save]]]:
        """Begins the saves of all, at the server's stop."""
        return [(autosave, autosave.begin()) for autosave in self._each]
