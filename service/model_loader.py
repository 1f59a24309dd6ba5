"""What a change of the model needs of whoever can load one; tests change to fakes.

Everything is blocking and called on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from engine.adapters.kept import KeptAdapters
from engine.memory.split import PoolSizes
from engine.types import EventSink
from service.loaded import LoadedModel, ModelNames


class LoadStage(Enum):
    """What a change of the model is doing."""

    CHECK = "check"
    DRAIN = "drain"
    WEIGHTS = "weights"
    EXPERTS = "experts"
    COMPILE = "compile"
    ROLL_BACK = "roll_back"


OnProgress = Callable[[LoadStage, int, int], None]
"""Hears the stage, how much of it is done, and of how much."""


@dataclass(frozen=True)
class ModelOrder:
    """A model to load.

    `path` is a GGUF file, `kept` are the adapters that it takes over, `named` is what the caller
    called it. `names` and `sizes` are those of a model that is to come back as it was; None are
    those of the start's flags.
    """

    path: Path
    kept: KeptAdapters
    named: str = ""
    names: ModelNames | None = None
    sizes: PoolSizes | None = None


@dataclass(frozen=True)
class LoadPlan:
    """How a model fits into memory.

    `needed_bytes` is an estimate. `available_bytes` can be had while another model is served, None
    where nobody knows. `limit_bytes` is all that there is, of which `least_bytes` must be had.
    """

    needed_bytes: int
    least_bytes: int
    limit_bytes: int
    available_bytes: int | None

    @property
    def fits_beside(self) -> bool:
        """Whether two models fit, as far as that can be told before."""
        return self.available_bytes is not None and self.needed_bytes <= self.available_bytes


class ModelLoader(Protocol):
    """Loads models under the flags of the start."""

    def check(self, order: ModelOrder) -> LoadPlan:
        """Looks at everything of a model before any of it is loaded.

        Raises:
            EngineError: The file, a size or an adapter is refused.
        """
        ...

    def load(self, order: ModelOrder, sink: EventSink, on_progress: OnProgress) -> LoadedModel:
        """Loads a model; its engine is not started.

        Raises:
            EngineError: The model is refused.
            Exception: Whatever `on_progress` raises, which ends the load.
        """
        ...

    def release(self) -> None:
        """Gives memory back of a model that nothing refers to any more."""
        ...
