"""Changes of the loaded set that take more than a moment: loads in pieces, unloads that wait.

A load writes a few megabytes between two steps, so that no stream waits longer for it than for a
prompt of another. An unload waits for the last request that uses the adapter; whoever comes while
it waits finds the adapter gone, so that no stream of users can hold it up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass

from engine.adapters.errors import AdapterInUse
from engine.adapters.loaded import LoadedAdapter, LoadedAdapters, NewAdapter
from engine.errors import EngineError

# What is copied between two steps: about a millisecond of memory's time.
STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class Load:
    """A wish to load; cancel the future to give up."""

    new: NewAdapter
    done: Future[LoadedAdapter]


@dataclass(frozen=True)
class Unload:
    """A wish to unload; the future gets the bytes that are free again."""

    adapter_id: int
    fail_if_busy: bool
    done: Future[int]


class AdapterChanges:
    """The loads and unloads that are not done. Owned by the engine thread."""

    def __init__(self, loaded: LoadedAdapters, count_users: Callable[[int], int]) -> None:
        """`count_users` counts the requests that run under a set with an adapter."""
        self._loaded = loaded
        self._count_users = count_users
        self._unloads: list[Unload] = []
        self._loads: deque[Load] = deque()
        self._writing: Generator[int, None, LoadedAdapter] | None = None

    def __len__(self) -> int:
        return len(self._unloads) + len(self._loads)

    def add_load(self, load: Load) -> None:
        """Queues a load."""
        self._loads.append(load)

    def add_unload(self, unload: Unload) -> None:
        """Queues an unload, or fails it at once if it may not wait."""
        users = self._count_users(unload.adapter_id)
        if users and unload.fail_if_busy:
            if unload.done.set_running_or_notify_cancel():
                unload.done.set_exception(AdapterInUse(unload.adapter_id, users))
            return
        self._unloads.append(unload)
        self._fence()

    def run(self) -> None:
        """Unloads what nobody uses now, then writes some of what is to be loaded."""
        waiting, self._unloads = self._unloads, []
        for unload in waiting:
            if unload.done.cancelled():
                continue
            if self._count_users(unload.adapter_id):
                self._unloads.append(unload)
            elif unload.done.set_running_or_notify_cancel():
                self._detach(unload)
        self._fence()
        self._write_some()

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Fails everything that waits."""
        waiting = [*self._unloads, *self._loads]
        self._unloads, self._writing = [], None
        self._loads.clear()
        self._fence()
        for wish in waiting:
            if wish.done.set_running_or_notify_cancel():
                wish.done.set_exception(make_error())

    def _fence(self) -> None:
        """Keeps new requests off what is to go, and lets them back where that was given up."""
        self._loaded.leave(unload.adapter_id for unload in self._unloads)

    def _detach(self, unload: Unload) -> None:
        try:
            unload.done.set_result(self._loaded.detach(unload.adapter_id))
        except EngineError as error:
            unload.done.set_exception(error)

    def _write_some(self) -> None:
        left_bytes = STEP_BYTES
        while self._loads and left_bytes > 0:
            left_bytes -= self._write_piece(self._loads[0])

    def _write_piece(self, load: Load) -> int:
        """Goes on with the first load; returns the bytes that were copied."""
        if load.done.cancelled():
            self._next_load()
            return 0
        writing = self._writing or self._loaded.attaching(load.new)
        self._writing = writing
        try:
            return next(writing)
        except StopIteration as end:
            self._next_load()
            # Who gave up in this moment has loaded it all the same, as a late answer would have.
            if load.done.set_running_or_notify_cancel():
                load.done.set_result(end.value)
        except EngineError as error:
            self._next_load()
            if load.done.set_running_or_notify_cancel():
                load.done.set_exception(error)
        return 0

    def _next_load(self) -> None:
        self._writing = None
        self._loads.popleft()
