"""How far the load of a model is, from the thread that loads to the call that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from service.model_loader import LoadStage


@dataclass(frozen=True)
class Progress:
    """How much of a stage is done, and of how much; 0 of 0 where a stage has no measure."""

    stage: LoadStage
    done: int = 0
    total: int = 0


class GivenUp(Exception):
    """Nobody wants the model any more; raised on the thread that loads."""


class LoadWatch:
    """One load, watched on the event loop that makes this. Called on the thread that loads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._last: tuple[LoadStage, int] | None = None
        self._is_given_up = False
        self.is_committed = False

    def __call__(self, stage: LoadStage, done: int, total: int) -> None:
        """Shows each whole percent of a stage once.

        Raises:
            GivenUp: The load is to end.
        """
        if self._is_given_up:
            raise GivenUp
        now = (stage, done * 100 // total if total else 0)
        if now != self._last and not self._loop.is_closed():
            self._last = now
            self._loop.call_soon_threadsafe(self._queue.put_nowait, Progress(stage, done, total))

    def show(self, stage: LoadStage) -> None:
        """Shows the begin of a stage; on the event loop."""
        self._queue.put_nowait(Progress(stage))

    def commit(self) -> None:
        """Says that the old model is being let go: who gives up now gets the new one all the same."""
        self.is_committed = True

    def give_up(self) -> None:
        """Ends the load at its next step."""
        self._is_given_up = True

    def end(self) -> None:
        """Says that nothing more will be shown."""
        # Behind what the thread that loads has sent before.
        self._loop.call_soon(self._queue.put_nowait, None)

    async def shown(self) -> AsyncGenerator[Progress]:
        """Yields what is shown, up to the end."""
        while (progress := await self._queue.get()) is not None:
            yield progress
