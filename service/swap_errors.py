"""The typed failures of a change of the model; see `engine.errors`, of which these are the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import EngineError


@dataclass(eq=False)
class ModelSwapBusy(EngineError):
    """The model is being changed, or what a change of it takes over is."""

    cause: str

    reason: ClassVar[str] = "MODEL_SWAP_BUSY"
    template: ClassVar[str] = "not now: {cause}"


@dataclass(eq=False)
class ModelFileNotFound(EngineError):
    """There is no such model below the folder."""

    path: str

    reason: ClassVar[str] = "MODEL_FILE_NOT_FOUND"
    template: ClassVar[str] = "{path}: there is no such model"


@dataclass(eq=False)
class ModelInUse(EngineError):
    """Requests had not ended in the time that they were given; the model goes on serving."""

    active_requests: int

    reason: ClassVar[str] = "MODEL_IN_USE"
    template: ClassVar[str] = "{active_requests} requests still ran at the end of the drain"


@dataclass(eq=False)
class ModelTooLarge(EngineError):
    """The least that a model takes is more than there is, whether another is served or not."""

    path: str
    needed_bytes: int
    limit_bytes: int

    reason: ClassVar[str] = "MODEL_TOO_LARGE"
    template: ClassVar[str] = (
        "{path}: weights, adapters and the smallest pools take {needed_bytes} bytes, of "
        "{limit_bytes} that there are"
    )


@dataclass(eq=False)
class ModelRolledBack(EngineError):
    """The new model could not be loaded after the old one was let go; that is back."""

    path: str
    detail: str

    reason: ClassVar[str] = "MODEL_ROLLED_BACK"
    template: ClassVar[str] = "{path}: {detail}; the model of before is served again"


@dataclass(eq=False)
class ModelLost(EngineError):
    """The new model could not be loaded, nor the old one again: nothing is served any more."""

    path: str
    detail: str

    reason: ClassVar[str] = "MODEL_LOST"
    template: ClassVar[str] = "{path}: {detail}; the model of before could not be loaded again"
