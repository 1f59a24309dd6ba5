"""Where calls wait that arrive while the model is changed: as many, and as large, as may queue.

Everything here runs on the event loop. It must not know a message or a model.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from engine.errors import QueueFull


class WaitingRoom:
    """Counts calls and their bytes; whoever finds it full is told to come back."""

    def __init__(self, *, max_calls: int, max_bytes: int) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._num_calls = 0
        self._num_bytes = 0

    @property
    def num_calls(self) -> int:
        """Calls that wait now."""
        return self._num_calls

    @contextmanager
    def place(self, size: int) -> Generator[None]:
        """Keeps a place for a call of `size` bytes until the block ends.

        Raises:
            QueueFull: There is none.
        """
        if self._num_calls >= self._max_calls:
            raise QueueFull(self._num_calls, self._max_calls)
        if self._num_bytes + size > self._max_bytes:
            raise QueueFull(self._num_bytes + size, self._max_bytes)
        self._num_calls += 1
        self._num_bytes += size
        try:
            yield
        finally:
            self._num_calls -= 1
            self._num_bytes -= size
