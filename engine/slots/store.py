"""The slot files of one engine: where they lie, what they must fit, who sees which.

Blocking: callers have a thread for it. Knows files and the model's identity, no slot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import EngineError
from engine.requests import AdapterScale
from engine.slots.file_work import RestoreOrder, SaveOrder
from engine.slots.folder import SavedFile, SlotFolder, own_name
from engine.slots.identity import Identity
from engine.slots.manifest import AdapterMark
from engine.slots.reader import Acceptance, open_slot
from engine.types import AdapterInfo


@dataclass(frozen=True)
class StoredSlot:
    """A saved slot as its head tells it; `refusal` is what a restore would raise for that alone."""

    file: SavedFile
    num_tokens: int
    model_name: str
    fingerprint: str
    refusal: EngineError | None


def no_adapters() -> Sequence[AdapterInfo]:
    """Those of an engine without adapters: state under any set is refused."""
    return ()


class SlotStore:
    """Saved slots under one folder. Every method may be called by any thread."""

    def __init__(
        self,
        root: str,
        identity: Identity,
        *,
        vocab_size: int,
        context_tokens: int,
        adapters: Callable[[], Sequence[AdapterInfo]] = no_adapters,
        limit_bytes: int | None = None,
    ) -> None:
        """`root` must exist; `context_tokens` are those of a slot; `adapters` are loaded now.

        `limit_bytes` is what all files may take together, None as much as there is.
        """
        self.identity = identity
        self._root = root
        self._limit_bytes = limit_bytes
        self._freeing = threading.Lock()
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._adapters = adapters

    def sweep(self) -> int:
        """Removes what saves of dead processes left; returns how many files.

        Raises:
            SlotIo: The folder cannot be read or written.
        """
        return SlotFolder(self._root).sweep()

    def save_order(self, filename: str, tenant: str, fingerprint: str) -> SaveOrder:
        """What saving into a tenant's folder takes.

        Args:
            filename: Of the file.
            tenant: Whose folder it goes to.
            fingerprint: What `identity` answered.
        """
        identity = self.identity
        folder = SlotFolder(self._root, tenant, self._limit_bytes, self._freeing)
        return SaveOrder(folder, filename, fingerprint, identity.traits, identity.model_name)

    def restore_order(
        self, filename: str, tenant: str, fingerprint: str, *, owns_all: bool = False
    ) -> RestoreOrder:
        """What restoring from a tenant's folder takes; `owns_all`: state of others too."""
        accepted = self._accepted(None if owns_all else tenant)
        return RestoreOrder(SlotFolder(self._root, tenant), filename, fingerprint, accepted)

    def autosave_order(self, slot_id: int, fingerprint: str) -> SaveOrder:
        """What the server's own save of a slot takes; the file knows whose state it is."""
        return self.save_order(own_name(slot_id, fingerprint), "", fingerprint)

    def take_over(self) -> Sequence[EngineError]:
        """Renames the server's own saves of versions that did not tell models apart.

        Returns:
            What is wrong with those that stay as they are.

        Raises:
            SlotIo: The folder cannot be read.
        """
        folder = SlotFolder(self._root)
        errors: list[EngineError] = []
        for slot_id, name in folder.list_unmarked().items():
            try:
                with open_slot(folder, name) as slot:
                    fingerprint = slot.fingerprint
                folder.mark(name, slot_id, fingerprint)
            except EngineError as error:
                errors.append(error)
        return errors

    def has_autosaved(self) -> bool:
        """Whether the server saved a slot of its own accord, of this model or another.

        Raises:
            SlotIo: The folder cannot be read.
        """
        return SlotFolder(self._root).has_own()

    def autosaved(self, fingerprint: str) -> dict[int, str]:
        """Returns the server's own saves of this model by slot id.

        Raises:
            SlotIo: The folder cannot be read.
        """
        return SlotFolder(self._root).list_own(fingerprint)

    def delete_autosave(self, slot_id: int, fingerprint: str) -> None:
        """Deletes the server's own save of a slot of this model.

        Raises:
            SlotFileNotFound, SlotFileCorrupt, SlotIo: As `SlotFolder.delete`.
        """
        SlotFolder(self._root).delete(own_name(slot_id, fingerprint))

    def refuse_early(self, filename: str, tenant: str, *, owns_all: bool = False) -> None:
        """Looks at a file before anything waits for the identity or for a slot.

        Raises:
            EngineError: What a restore of it would raise, as far as that shows already.
        """
        with open_slot(SlotFolder(self._root, tenant), filename) as slot:
            slot.refuse_early(self._accepted(None if owns_all else tenant))

    def list(
        self, tenant: str, *, after: str, limit: int, owns_all: bool = False
    ) -> tuple[Sequence[StoredSlot], bool]:
        """Returns at most `limit` files behind the name `after`, and whether there are more.

        Raises:
            SlotIo: The folder cannot be read.
        """
        folder = SlotFolder(self._root, tenant)
        files = [file for file in folder.list() if file.filename > after]
        accepted = self._accepted(None if owns_all else tenant)
        shown = [self._describe(folder, file, accepted) for file in files[:limit]]
        return shown, len(files) > limit

    def delete(self, filename: str, tenant: str) -> int:
        """Deletes a file; returns its size.

        Raises:
            SlotFileNotFound, SlotFileCorrupt, SlotIo: As `SlotFolder.delete`.
        """
        return SlotFolder(self._root, tenant).delete(filename)

    def _describe(self, folder: SlotFolder, file: SavedFile, accepted: Acceptance) -> StoredSlot:
        try:
            with open_slot(folder, file.filename) as slot:
                shown = (slot.num_tokens, slot.model_name, slot.fingerprint)
                try:
                    slot.refuse_early(accepted)
                    fingerprint = self.identity.known()
                    if fingerprint is not None:
                        slot.verify(accepted, fingerprint)
                except EngineError as error:
                    return StoredSlot(file, *shown, error)
                return StoredSlot(file, *shown, None)
        except EngineError as error:
            return StoredSlot(file, 0, "", "", error)

    def _accepted(self, tenant: str | None) -> Acceptance:
        return Acceptance(
            traits=self.identity.traits,
            vocab_size=self._vocab_size,
            context_tokens=self._context_tokens,
            tenant=tenant,
            scales_of=self._scales_of,
            adapters=", ".join(adapter.name for adapter in self._adapters()) or "none",
        )

    def _scales_of(self, marks: tuple[AdapterMark, ...]) -> tuple[AdapterScale, ...] | None:
        """Finds the adapters of a set by their content, None if one is not loaded."""
        staying = (one for one in self._adapters() if not one.is_leaving)
        by_content = {one.digest.hex(): one.adapter_id for one in staying}
        if any(mark.content not in by_content for mark in marks):
            return None
        return tuple(AdapterScale(by_content[mark.content], mark.scale) for mark in marks)
