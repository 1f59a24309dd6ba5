"""What the engine refuses about saved slots: one class per cause, as `engine.errors` has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import EngineError


@dataclass(eq=False)
class SlotFileNotFound(EngineError):
    """There is no saved slot of this name."""

    filename: str

    reason: ClassVar[str] = "SLOT_FILE_NOT_FOUND"
    template: ClassVar[str] = "there is no slot file {filename!r}"


@dataclass(eq=False)
class SlotFileMismatch(EngineError):
    """A whole slot file whose state this model cannot continue; `field` says what differs."""

    field: str
    expected: str
    found: str

    reason: ClassVar[str] = "SLOT_FILE_MISMATCH"
    template: ClassVar[str] = "the slot file has other {field}: {found}, here {expected}"


@dataclass(eq=False)
class SlotFileCorrupt(EngineError):
    """A slot file that is damaged, cut, or none at all."""

    filename: str
    detail: str

    reason: ClassVar[str] = "SLOT_FILE_CORRUPT"
    template: ClassVar[str] = "slot file {filename!r}: {detail}"


@dataclass(eq=False)
class SlotContextTooSmall(EngineError):
    """A saved slot holds more tokens than a slot of this server can."""

    tokens: int
    context_tokens: int

    reason: ClassVar[str] = "SLOT_CONTEXT_TOO_SMALL"
    template: ClassVar[str] = (
        "the slot file holds {tokens} tokens, more than fit in a context of {context_tokens} tokens"
    )


@dataclass(eq=False)
class DiskFull(EngineError):
    """A slot file could not be written for want of room; what was there before is still there."""

    filename: str

    reason: ClassVar[str] = "DISK_FULL"
    template: ClassVar[str] = "no room for slot file {filename!r}"


@dataclass(eq=False)
class SlotIo(EngineError):
    """A slot file, or the folder of them, could not be read or written."""

    filename: str
    errno: int
    detail: str

    reason: ClassVar[str] = "SLOT_IO"
    template: ClassVar[str] = "slot file {filename!r}: {detail} (errno {errno})"


@dataclass(eq=False)
class IdentityPending(EngineError):
    """The fingerprint of the model's weights was not ready within the deadline."""

    reason: ClassVar[str] = "IDENTITY_PENDING"
    template: ClassVar[str] = "the model's fingerprint is still being computed"


@dataclass(eq=False)
class ModelFileChanged(EngineError):
    """The model's file is not the one that was loaded, so that nobody can say what it holds."""

    detail: str

    reason: ClassVar[str] = "MODEL_FILE_CHANGED"
    template: ClassVar[str] = "slots cannot be saved or restored: {detail}"
