"""Pools that give their memory back while nobody asks for anything.

Weights, programs and adapters stay, so waking takes an allocation; what slots and the prefix index
held is gone. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.slots.table import SlotTable
from engine.step import Runner

_log = logging.getLogger(__name__)


class PoolSleep:
    """When the pools of an engine sleep; `after_s` None is never."""

    def __init__(
        self,
        after_s: float | None,
        runner: Runner,
        table: SlotTable,
        clock: Callable[[], float],
    ) -> None:
        self._after_s = after_s
        self._runner = runner
        self._table = table
        self._clock = clock
        self._idle_since_s = clock()
        self.is_asleep = False

    @property
    def due_s(self) -> float | None:
        """When they fall asleep if nothing happens until then; None if they sleep or never do."""
        if self._after_s is None or self.is_asleep:
            return None
        return self._idle_since_s + self._after_s

    def stay_awake(self) -> None:
        """Notes that something was done just now."""
        self._idle_since_s = self._clock()

    def fall_asleep_if_due(self) -> None:
        """Frees the pools of an idle engine once it has been idle for long enough."""
        due_s = self.due_s
        if due_s is None or self._clock() < due_s:
            return
        self._table.empty_all()
        self._runner.release_pools()
        self.is_asleep = True
        _log.info("asleep after %g s without work: the pools are freed", self._after_s)

    def wake(self) -> Exception | None:
        """Allocates them again, before anything that is to be done; returns why it failed."""
        if not self.is_asleep:
            return None
        try:
            self._runner.allocate_pools(self._runner.pools)
            self._runner.warm()
        except Exception as error:
            _log.exception("the pools could not be allocated again; they sleep on")
            self._runner.release_pools()
            return error
        self.is_asleep = False
        self.stay_awake()
        _log.info("awake")
        return None
