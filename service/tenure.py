"""A model's time in service: who uses it, so that its engine is closed after the last and no sooner.

Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from service.loaded import LoadedModel


class Tenure:
    """One model, from the moment that its engine runs until nobody uses it any more."""

    def __init__(self, model: LoadedModel) -> None:
        self._model: LoadedModel | None = model
        self._num_users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def model(self) -> LoadedModel:
        """The model, up to the end."""
        assert self._model is not None, "the model of a tenure that has ended"
        return self._model

    def end(self) -> LoadedModel:
        """Gives the model away, so that who holds the tenure keeps none of its memory."""
        model, self._model = self.model, None
        return model

    @property
    def num_users(self) -> int:
        """Calls that began on this model and have not ended."""
        return self._num_users

    @contextmanager
    def using(self) -> Generator[LoadedModel]:
        """Keeps the model until the block ends."""
        self._num_users += 1
        self._unused.clear()
        try:
            yield self.model
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()

    async def unused(self) -> None:
        """Waits until nobody uses it; somebody may again by then, unless it was replaced."""
        await self._unused.wait()
