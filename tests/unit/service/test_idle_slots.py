from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from engine.types import CacheSource, Started
from service.idle_slots import IdleSlotLog
from tests.fakes import fake_engine

STARTED = Started(1, 5, 0, CacheSource.NONE, "", (), 7)
SNAPSHOT = fake_engine(lambda _: None).snapshot()
HOLDING = replace(SNAPSHOT, slots=(replace(SNAPSHOT.slots[0], held_tokens=9), *SNAPSHOT.slots[1:]))
ENABLED, IDLE = "__TEST_TAG_CACHE_IDLE_SLOTS_ENABLED__", "__TEST_TAG_CACHE_IDLE_SLOT__"


def test_it_tells_of_other_slots_that_hold_something(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvarts.service")
    log = IdleSlotLog(is_on=True)
    assert ENABLED in caplog.text
    log.started(STARTED, SNAPSHOT)
    assert IDLE not in caplog.text
    log.started(replace(STARTED, slot_id=0), HOLDING)
    assert IDLE not in caplog.text
    log.started(STARTED, HOLDING)
    assert f"slot 0: 9 tokens stay cached {IDLE}" in caplog.text
    log.started(STARTED, HOLDING)
    assert caplog.text.count(IDLE) == 1
    assert "updating prompt cache" not in caplog.text
    log.started(replace(STARTED, cached_tokens=4), HOLDING)
    assert "slot 1: updating prompt cache, 4 tokens were there" in caplog.text


def test_off_it_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvarts.service")
    IdleSlotLog(is_on=False).started(replace(STARTED, cached_tokens=4), HOLDING)
    assert not caplog.text
