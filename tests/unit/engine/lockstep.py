"""File work of an engine on threads of which one runs at a time, and only when a test says so.

A thread runs until it waits for the engine, and goes on when it is told to; so a seed replays
exactly, whatever the machine does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

from engine.slots import engine_calls

# A thread that neither ends nor waits has lost its way.
_PATIENCE_S = 60.0
_own = threading.local()


class FileThread:
    """One piece of file work, asleep until `go`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._waits_for: Future[Any] | None = None
        self.has_ended = False
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def can_go(self) -> bool:
        """Whether it would get any further."""
        return self._waits_for is None or self._waits_for.done()

    def go(self) -> None:
        """Lets it run until it waits for the engine, or ends."""
        self._go.release()
        assert self._back.acquire(timeout=_PATIENCE_S), "file work hangs"

    def wait_for(self, done: Future[Any]) -> None:
        """Sleeps, on the thread itself, until it is told to go on and the future is done."""
        self._waits_for = done
        self._back.release()
        self._go.acquire()

    def _run(self) -> None:
        self._go.acquire()
        _own.thread = self
        try:
            self._work()
        finally:
            self.has_ended = True
            self._back.release()


class _Awaited(Future[Any]):
    """What the engine owes to file work."""

    def result(self, timeout: float | None = None) -> Any:
        thread: FileThread | None = getattr(_own, "thread", None)
        if thread is not None and not self.done():
            thread.wait_for(self)
        return super().result(timeout)


@contextmanager
def lockstep() -> Generator[None]:
    """Makes file threads wait for the engine the way `FileThread` knows."""
    with mock.patch.object(engine_calls, "Future", _Awaited):
        yield
