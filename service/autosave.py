"""Keeps what slots hold over a restart: saved when the server stops, restored after the next start.

A convenience, never a reason to fail: whatever goes wrong is logged and the slot begins empty.
"""

from __future__ import annotations

import asyncio
import logging

from engine.engine import Engine
from engine.errors import EngineError
from engine.scheduling.wishes import Restore, Save
from engine.slots.store import SlotStore

_LOG = logging.getLogger("kvarts.service")


class Autosave:
    """The saves of a server's stop and the restores of its start, of the model that is served."""

    def __init__(self, engine: Engine, store: SlotStore) -> None:
        self._engine = engine
        self._store = store
        self._has_begun = False

    async def restore(self) -> None:
        """Restores each slot that was saved and has not been used yet, in the background."""
        names = await asyncio.to_thread(self._store.autosaved)
        if not names:
            return
        try:
            with self._store.identity.waiting() as done:
                fingerprint = await asyncio.wrap_future(done)
        except EngineError as error:
            _LOG.warning("slots of the last run are not restored: %s", error)
            return
        for slot_id, name in names.items():
            try:
                await self._restore(slot_id, name, fingerprint)
            except EngineError as error:
                _LOG.warning("slot %d of the last run is not restored: %s", slot_id, error)

    def begin(self) -> list[Save]:
        """Asks the engine to save every slot once it is idle; once, before the engine is stopped."""
        if self._has_begun:
            return []
        self._has_begun = True
        fingerprint = self._store.identity.known()
        if fingerprint is None:
            _LOG.warning("slots are not saved: the model's fingerprint is not known")
            return []
        saves: list[Save] = []
        for slot in self._engine.snapshot().slots:
            order = self._store.autosave_order(slot.slot_id, fingerprint)
            save = Save(slot.slot_id, order, outlives_stop=True)
            self._engine.transfer_slot(save)
            saves.append(save)
        return saves

    async def end(self, saves: list[Save]) -> None:
        """Tells what became of them, once the engine has stopped."""
        for save in saves:
            try:
                saved = await asyncio.wrap_future(save.done)
            except EngineError as error:
                _LOG.warning("slot %d is not saved: %s", save.slot_id, error)
                continue
            if not saved.tokens:
                # An empty slot needs no file, and the one of an earlier run must not come back.
                await asyncio.to_thread(self._store.delete_autosave, save.slot_id)
                continue
            _LOG.info("slot %d: %d tokens saved", saved.slot_id, saved.tokens)

    async def _restore(self, slot_id: int, name: str, fingerprint: str) -> None:
        slots = self._engine.snapshot().slots
        if slot_id >= len(slots) or slots[slot_id].request or slots[slot_id].held_tokens:
            return
        order = self._store.restore_order(name, "", fingerprint, owns_all=True)
        restore = Restore(slot_id, order, fail_if_busy=True)
        self._engine.transfer_slot(restore)
        restored = await asyncio.wrap_future(restore.done)
        await asyncio.to_thread(self._store.delete_autosave, slot_id)
        _LOG.info("slot %d: %d tokens of the last run", slot_id, restored.tokens)
