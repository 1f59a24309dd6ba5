"""The typed failures of adapters; see `engine.errors`, of which these are the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import EngineError


@dataclass(eq=False)
class AdapterExists(EngineError):
    """The name is taken by an adapter of other content, or by one that is being unloaded."""

    name: str
    adapter_id: int

    reason: ClassVar[str] = "ADAPTER_EXISTS"
    template: ClassVar[str] = (
        "the name {name!r} is taken by adapter {adapter_id}, which is of other content or about to "
        "be unloaded"
    )


@dataclass(eq=False)
class PathOutsideRoot(EngineError):
    """A path that leaves the folder it is relative to."""

    path: str

    reason: ClassVar[str] = "PATH_OUTSIDE_ROOT"
    template: ClassVar[str] = "path {path!r} leaves its folder"


@dataclass(eq=False)
class AdapterFileNotFound(EngineError):
    """There is no such adapter."""

    path: str

    reason: ClassVar[str] = "ADAPTER_FILE_NOT_FOUND"
    template: ClassVar[str] = "{path}: there is no such adapter"


@dataclass(eq=False)
class AdapterFileInvalid(EngineError):
    """A file that is damaged, or no LoRA adapter."""

    path: str
    detail: str

    reason: ClassVar[str] = "ADAPTER_FILE_INVALID"
    template: ClassVar[str] = "{path}: {detail}"


@dataclass(eq=False)
class AdapterMismatch(EngineError):
    """A well-formed adapter that is not one of this model's."""

    path: str
    tensor: str
    expected: str
    found: str

    reason: ClassVar[str] = "ADAPTER_MISMATCH"
    template: ClassVar[str] = "{path}: {tensor}: expected {expected}, found {found}"


@dataclass(eq=False)
class RankTooLarge(EngineError):
    """The adapter's rank is above what the banks were made for."""

    path: str
    tensor: str
    rank: int
    max_rank: int

    reason: ClassVar[str] = "RANK_TOO_LARGE"
    template: ClassVar[str] = (
        "{path}: {tensor} has rank {rank}, the server takes {max_rank} at most"
    )


@dataclass(eq=False)
class AdapterRoom(EngineError):
    """Every place of the banks is taken."""

    needed_bytes: int
    free_bytes: int
    max_adapters: int

    reason: ClassVar[str] = "ADAPTER_ROOM"
    template: ClassVar[str] = (
        "the adapter needs {needed_bytes} bytes, {free_bytes} are free: all {max_adapters} places "
        "are taken"
    )


@dataclass(eq=False)
class AdapterInUse(EngineError):
    """Requests run under a set with this adapter."""

    adapter_id: int
    active_requests: int

    reason: ClassVar[str] = "ADAPTER_IN_USE"
    template: ClassVar[str] = "adapter {adapter_id} is in use by {active_requests} requests"
