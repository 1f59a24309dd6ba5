"""What idle slots keep cached, in the log at level debug, with the marks that scripts look for.

Source: the marks that llama-server's own tests read in its log.
"""

from __future__ import annotations

import logging

from engine.types import SlotState, Snapshot, Started

_LOG = logging.getLogger("kvarts.service")


class IdleSlotLog:
    """Tells of idle slots when a request starts, once of what each holds; nothing unless `is_on`."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._told: dict[int, int] = {}
        if is_on:
            _LOG.debug("idle slots keep what they hold __TEST_TAG_CACHE_IDLE_SLOTS_ENABLED__")

    def started(self, event: Started, snapshot: Snapshot) -> None:
        """A request has begun on a slot."""
        if not (self._is_on and _LOG.isEnabledFor(logging.DEBUG)):
            return
        for slot in snapshot.slots:
            is_idle = slot.slot_id != event.slot_id and slot.state is SlotState.IDLE
            if is_idle and slot.held_tokens and self._told.get(slot.slot_id) != slot.task_id:
                self._told[slot.slot_id] = slot.task_id
                _LOG.debug(
                    "slot %d: %d tokens stay cached __TEST_TAG_CACHE_IDLE_SLOT__",
                    slot.slot_id,
                    slot.held_tokens,
                )
        if event.cached_tokens:
            _LOG.debug(
                "slot %d: updating prompt cache, %d tokens were there",
                event.slot_id,
                event.cached_tokens,
            )
