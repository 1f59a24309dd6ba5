"""Threads beside the engine's own, which no end of the process waits for. Knows no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial


def start_on_thread(work: Callable[[], None]) -> None:
    """Runs something on a thread of its own."""
    threading.Thread(target=work, name="engine-side", daemon=True).start()


class FileThreads:
    """Threads that save and restore: few of them work at a time, the others wait for their turn.

    Each has some pieces of a state in memory, and one or two keep a disk busy.
    """

    def __init__(self, num_working: int = 2) -> None:
        self._turns = threading.Semaphore(num_working)

    def __call__(self, work: Callable[[], None]) -> None:
        """Runs something on a thread of its own, when it is its turn."""
        start_on_thread(partial(self._run, work))

    def _run(self, work: Callable[[], None]) -> None:
        with self._turns:
            work()
