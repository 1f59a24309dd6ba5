"""What a thread of file work asks the engine thread to do between steps, and waits for.

Knows no slot: work is a function without arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class EngineCalls:
    """Any thread may call `call`; nobody waits for ever, even if the engine dies or ends."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        """`post` hands a command to the engine thread, which takes it between two steps."""
        self._post = post
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._closing: Callable[[], Exception] | None = None

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Asks for some work; its result, or what it raises, comes through the future."""
        done: Future[Result] = Future()
        with self._lock:
            if self._closing is not None:
                done.set_exception(self._closing())
                return done
            self._open.add(done)
        self._post(lambda: self._run(work, done))
        return done

    def close(self, make_error: Callable[[], Exception]) -> None:
        """Fails all that was asked for and not done, and all that will be."""
        with self._lock:
            self._closing = make_error
            waiting, self._open = self._open, set()
        for done in waiting:
            if done.set_running_or_notify_cancel():
                done.set_exception(make_error())

    def _run(self, work: Callable[[], Result], done: Future[Result]) -> None:
        with self._lock:
            if done not in self._open:
                return
            self._open.discard(done)
        try:
            result = work()
        except Exception as error:
            done.set_exception(error)
            return
        done.set_result(result)
