"""A bound on each of many waits for a reader, with one timer for all of them.

A timeout of its own costs a token more than writing it does. Knows no message and no transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Stall:
    """Ends the block that it stands around with a TimeoutError once one `wait` in it is too long.

    Example:
        async with Stall(30.0) as stall:
            await stall.wait(context.write(message))
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since_s: float | None = None

    async def __aenter__(self) -> Stall:
        """Begins to look at how long waits take."""
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raises TimeoutError if a wait was cut off."""
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    @property
    def has_ended(self) -> bool:
        """Whether a wait was too long: not every TimeoutError is of a stall."""
        return self._timeout.expired()

    async def wait(self, work: Awaitable[T]) -> T:
        """Awaits something of the reader's; one at a time."""
        self._since_s = self._loop.time()
        try:
            return await work
        finally:
            self._since_s = None

    def _look(self) -> None:
        now_s = self._loop.time()
        due_s = self._limit_s + (now_s if self._since_s is None else self._since_s)
        if due_s <= now_s:
            self._timeout.reschedule(now_s)
        else:
            self._timer = self._loop.call_at(due_s, self._look)
