"""The doors to the loaded adapters: any thread may use them, the engine thread does the work.

Files are read and checked on the caller's thread; what changes the loaded set is a command that the
engine takes between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.changes import AdapterChanges, Load, Unload
from engine.adapters.content import AdapterContent
from engine.adapters.fit import TargetModel
from engine.adapters.kept import KeptAdapters
from engine.adapters.loaded import LoadedAdapter, LoadedAdapters, NewAdapter
from engine.adapters.source import read_adapter
from engine.adapters.store import AdapterStore
from engine.requests import AdapterScale


@dataclass(frozen=True)
class AdapterSetup:
    """What an engine that takes adapters is made with."""

    store: AdapterStore
    capacity: AdapterCapacity
    model: TargetModel

    @property
    def place_bytes(self) -> int:
        """Memory that one adapter takes of the banks, whatever its rank."""
        return self.capacity.place_bytes(self.model.matrices.values())

    @property
    def bank_bytes(self) -> int:
        """Memory of the banks, whether in use or not."""
        return self.capacity.nbytes(self.model.matrices.values())


@dataclass(frozen=True)
class EngineDoors:
    """How a desk reaches its engine.

    `command` runs work between two steps; `watch` posts work that itself answers a future, which
    must not be left without an answer; `changes` is the engine thread's.
    """

    command: Callable[[Callable[[], Any]], Future[Any]]
    watch: Callable[[Future[Any], Callable[[], None]], None]
    changes: AdapterChanges


class AdapterDesk:
    """Loads, lists, scales and unloads adapters of a running engine."""

    def __init__(self, setup: AdapterSetup, loaded: LoadedAdapters, doors: EngineDoors) -> None:
        self._setup = setup
        self._loaded = loaded
        self._doors = doors

    @property
    def setup(self) -> AdapterSetup:
        """How many adapters of which rank the engine takes, and of which model."""
        return self._setup

    @property
    def ids(self) -> frozenset[int]:
        """The ids that a request may name now."""
        return self._loaded.ids

    @property
    def free_bytes(self) -> int:
        """Memory of the banks that no adapter holds."""
        return self._loaded.free_bytes

    def check_room(self, name: str) -> None:
        """Refuses an adapter for which there is no place, before anything of it is read.

        Raises:
            AdapterRoom: Every place is taken.
        """
        self._loaded.check_room(name)

    def read(self, path: Path) -> AdapterContent:
        """Reads and checks a file or a folder, on this thread.

        Raises:
            EngineError: As `engine.adapters.source.read_adapter`.
        """
        return read_adapter(path, self._setup.model, self._setup.capacity.rank)

    def kept(self) -> KeptAdapters:
        """What another engine takes over from this one; what is about to go is not of it."""
        staying = self._loaded.ids
        adapters = (one for one in self._loaded.adapters if one.adapter_id in staying)
        return KeptAdapters(tuple(adapters), self._setup.capacity, self._loaded.next_id)

    def attach(self, adapters: Sequence[NewAdapter], *, next_id: int = 0) -> None:
        """Attaches adapters to an engine that was not started; later ones get `next_id` at least.

        Raises:
            EngineError: As `LoadedAdapters.attach`.
        """
        for new in adapters:
            self._loaded.attach(new)
        self._loaded.skip_to(next_id)

    def load(self, new: NewAdapter) -> Future[LoadedAdapter]:
        """Attaches an adapter that was read; the future raises as `LoadedAdapters.attaching`.

        It takes as many steps as its size wants; cancel the future to give up.

        Raises:
            EngineError: ShuttingDown or EngineFault.
        """
        done: Future[LoadedAdapter] = Future()
        load = Load(new, done)
        self._doors.watch(done, lambda: self._doors.changes.add_load(load))
        return done

    def set_scales(self, scales: Sequence[AdapterScale]) -> Future[None]:
        """Replaces the server's set for requests that are admitted later.

        The future raises NoSuchAdapter.

        Raises:
            EngineError: ShuttingDown or EngineFault.
        """
        return self._doors.command(lambda: self._loaded.set_scales(scales))

    def unload(self, adapter_id: int, *, fail_if_busy: bool = False) -> Future[int]:
        """Unloads an adapter once no request uses it; cancel the future to stop waiting.

        Until then it is gone for whoever comes: requests that name it are refused, and the server's
        set is without it. The future gets the bytes that were freed, or raises NoSuchAdapter, AdapterInUse,
        ShuttingDown or EngineFault.

        Raises:
            EngineError: NoSuchAdapter, ShuttingDown or EngineFault.
        """
        self._loaded.get(adapter_id)
        done: Future[int] = Future()
        unload = Unload(adapter_id, fail_if_busy, done)
        self._doors.watch(done, lambda: self._doors.changes.add_unload(unload))
        return done


class _NoStore:
    """Banks without a place."""

    def write_adapter(self, place: int, content: AdapterContent) -> Iterator[int]:
        raise AssertionError(f"an adapter in place {place} of none")

    def clear_adapter(self, place: int) -> None:
        raise AssertionError(f"an adapter in place {place} of none")


NO_ADAPTERS = AdapterSetup(_NoStore(), AdapterCapacity(), TargetModel("", 0, {}))
"""Of an engine that takes no adapters."""
