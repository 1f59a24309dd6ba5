"""What callers want of a slot's state, and what they get: plain data."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.requests import AdapterScale
from engine.slots.file_work import RestoreOrder, SaveOrder


@dataclass(frozen=True)
class SavedSlot:
    """What was saved. `elapsed_s` leaves waiting and computing out."""

    slot_id: int
    tokens: int
    size_bytes: int
    elapsed_s: float


@dataclass(frozen=True)
class RestoredSlot:
    """What was restored, and under which adapters it may be used. `elapsed_s` is without waiting."""

    slot_id: int
    tokens: int
    size_bytes: int
    elapsed_s: float
    adapters: tuple[AdapterScale, ...]


@dataclass(eq=False)
class Save:
    """A wish to save a slot; cancel `done` to give it up.

    `tenant` None may save every tenant's content. With `outlives_stop` it is still begun after a
    stop was asked for.
    """

    slot_id: int
    order: SaveOrder
    fail_if_busy: bool = False
    tenant: str | None = None
    outlives_stop: bool = False
    done: Future[SavedSlot] = field(default_factory=Future[SavedSlot])


@dataclass(eq=False)
class Restore:
    """A wish to restore a slot; cancel `done` to give it up."""

    slot_id: int
    order: RestoreOrder
    fail_if_busy: bool = False
    done: Future[RestoredSlot] = field(default_factory=Future[RestoredSlot])


def is_wanted(wish: Save | Restore) -> bool:
    """Whether somebody waits for the outcome; from now on it cannot be given up any more."""
    return not wish.done.done() and wish.done.set_running_or_notify_cancel()


def fail(wish: Save | Restore, error: Exception) -> None:
    """Tells whoever waits that it failed."""
    if is_wanted(wish):
        wish.done.set_exception(error)
