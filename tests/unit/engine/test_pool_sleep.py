"""Pools that sleep while nothing is to do, over the fake device, which forgets what is freed."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from engine.errors import EngineFault
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport
from engine.types import Failed
from tests.unit.engine.drive import Drive, ask, solo

PROMPT = (60, 61, 62, 63)
AFTER_S = 5.0


def sleepy() -> Drive:
    return Drive(sleep_idle_s=AFTER_S)


def fall_asleep(drive: Drive) -> Drive:
    drive.rest()
    drive.clock.advance(AFTER_S)
    drive.engine.step()
    assert drive.engine.snapshot().is_asleep
    return drive


def test_it_falls_asleep_once_nothing_was_asked_for_long_enough() -> None:
    drive = sleepy()
    drive.engine.submit(ask("a", PROMPT))
    drive.rest()
    drive.clock.advance(AFTER_S - 0.1)
    drive.engine.step()
    assert not drive.engine.snapshot().is_asleep
    drive.engine.awake()  # counts as use
    drive.engine.step()
    drive.clock.advance(AFTER_S - 0.1)
    drive.engine.step()
    assert not drive.engine.snapshot().is_asleep
    drive.clock.advance(0.1)
    drive.engine.step()
    assert drive.engine.snapshot().is_asleep


def test_no_time_is_too_long_without_the_flag() -> None:
    drive = Drive()
    drive.clock.advance(1e9)
    drive.engine.step()
    assert not drive.engine.snapshot().is_asleep


def test_a_request_wakes_it_and_what_was_held_is_gone() -> None:
    drive = sleepy()
    drive.engine.submit(ask("a", PROMPT))
    fall_asleep(drive)
    (pool,) = drive.engine.snapshot().pools
    assert pool.free == pool.size
    assert all(slot.held_tokens == 0 for slot in drive.engine.snapshot().slots)
    drive.engine.submit(ask("b", PROMPT))
    drive.rest()
    assert not drive.engine.snapshot().is_asleep
    assert drive.tokens("b") == solo(PROMPT, 5)
    assert drive.finished("b").cached_tokens == 0
    drive.engine.check_integrity()


def test_running_requests_keep_it_awake() -> None:
    drive = sleepy()
    drive.engine.submit(ask("a", PROMPT, 8))
    for _ in range(6):
        drive.clock.advance(2 * AFTER_S)
        drive.engine.step()
        assert not drive.engine.snapshot().is_asleep
    drive.rest()
    assert drive.tokens("a") == solo(PROMPT, 8)


def test_it_wakes_for_a_rebuild() -> None:
    drive = fall_asleep(sleepy())
    done: Future[RebuildReport] = drive.rebuild(PoolSizes(kv=40))
    assert done.result(0).current.kv == 40
    drive.engine.submit(ask("a", PROMPT))
    drive.rest()
    assert drive.tokens("a") == solo(PROMPT, 5)


def test_without_memory_it_refuses_by_name_and_tries_again() -> None:
    drive = fall_asleep(sleepy())
    drive.runner.fail_allocations_with.append(MemoryError("no"))
    drive.engine.submit(ask("a", PROMPT))
    drive.engine.step()
    failed = drive.of("a")[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineFault)
    assert drive.engine.snapshot().is_asleep
    drive.engine.submit(ask("b", PROMPT))
    drive.rest()
    assert drive.tokens("b") == solo(PROMPT, 5)


@pytest.mark.parametrize("grace_s", [0.0, 3.0])
def test_it_ends_in_its_sleep(grace_s: float) -> None:
    drive = fall_asleep(sleepy())
    drive.engine.stop(grace_s)


def test_who_woke_them_finds_them_awake_in_the_snapshot() -> None:
    drive = fall_asleep(sleepy())
    seen: list[bool] = []
    done = drive.engine.awake()
    done.add_done_callback(lambda _: seen.append(drive.engine.snapshot().is_asleep))
    drive.engine.step()
    assert seen == [False]
