"""Unloading adapters, at once or when the last request that uses them has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from engine.adapters.errors import AdapterInUse
from engine.adapters.loaded import LoadedAdapters
from engine.errors import EngineError


@dataclass(frozen=True)
class Unload:
    """A wish to unload; the future gets the bytes that were freed."""

    adapter_id: int
    fail_if_busy: bool
    done: Future[int]


class Unloads:
    """The unloads that wait for users to end."""

    def __init__(self, loaded: LoadedAdapters, count_users: Callable[[int], int]) -> None:
        """`count_users` counts the requests that run under a set with an adapter."""
        self._loaded = loaded
        self._count_users = count_users
        self._waiting: list[Unload] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, unload: Unload) -> None:
        """Queues an unload, or fails it at once if it may not wait."""
        users = self._count_users(unload.adapter_id)
        if users and unload.fail_if_busy:
            if unload.done.set_running_or_notify_cancel():
                unload.done.set_exception(AdapterInUse(unload.adapter_id, users))
            return
        self._waiting.append(unload)

    def run(self) -> None:
        """Unloads what nobody uses now."""
        waiting, self._waiting = self._waiting, []
        for unload in waiting:
            if unload.done.cancelled():
                continue
            if self._count_users(unload.adapter_id):
                self._waiting.append(unload)
            elif unload.done.set_running_or_notify_cancel():
                self._detach(unload)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Fails every unload that waits."""
        waiting, self._waiting = self._waiting, []
        for unload in waiting:
            if unload.done.set_running_or_notify_cancel():
                unload.done.set_exception(make_error())

    def _detach(self, unload: Unload) -> None:
        try:
            unload.done.set_result(self._loaded.detach(unload.adapter_id))
        except EngineError as error:
            unload.done.set_exception(error)
