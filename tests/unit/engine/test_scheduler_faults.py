"""Steps, rows and admissions that fail: who ends, who goes on, and what is kept."""

from __future__ import annotations

from engine.errors import EngineFault
from engine.failpoints import Failpoints, InjectedFault, Site
from engine.scheduler import NonFiniteLogits
from engine.step import PoolLost
from tests.unit.engine.drive import A, B, Drive, ask, solo


def test_a_failing_step_ends_its_rows_and_the_engine_lives() -> None:
    drive = Drive(num_slots=3, max_decodes=1)
    for name in ("a", "b"):
        drive.engine.submit(ask(name, [ord(name), A], 20))
    drive.steps(2)
    cause = MemoryError("out of memory")
    drive.runner.fail_with = cause
    drive.steps()
    failed = [name for name in ("a", "b") if drive.end(name)]
    assert len(failed) == 1, "only the row of the failing batch ends"
    error = drive.error(failed[0])
    assert isinstance(error, EngineFault)
    assert error.__cause__ is cause
    assert drive.engine.snapshot().slots[2 if failed == ["a"] else 1].held_tokens == 0
    drive.rest()
    (survivor,) = {"a", "b"} - set(failed)
    assert drive.tokens(survivor) == solo([ord(survivor), A], 20)
    drive.engine.submit(ask("after", [ord(failed[0]), A]))
    drive.rest()
    assert drive.tokens("after") == solo([ord(failed[0]), A], 5)
    # What the failed step wrote is unknown, so nothing of it is reused.
    assert drive.started("after").cached_tokens == 0


def test_a_lost_pool_empties_every_slot_and_ends_only_the_failed_batch() -> None:
    drive = Drive(num_slots=4, max_decodes=1, kv_pages=64)
    drive.engine.submit(ask("idle", [A] * 9, 1, slot_id=0))
    drive.rest()
    for slot_id, name in ((1, "a"), (2, "b")):
        drive.engine.submit(ask(name, [ord(name), A], 20, slot_id=slot_id))
    drive.steps(5)
    cause = PoolLost("the device was reset")
    drive.runner.fail_with = cause
    drive.steps()
    ended = [name for name in ("a", "b") if drive.end(name)]
    assert len(ended) == 1
    error = drive.error(ended[0])
    assert isinstance(error, EngineFault)
    assert error.__cause__ is cause
    now = drive.engine.snapshot()
    assert [slot.held_tokens for slot in now.slots] == [0, 0, 0, 0]
    assert now.pools[0].free == now.pools[0].size
    assert (now.running, now.queued, now.counters.preemptions) == (0, 1, 1)
    drive.rest()
    # The other one was not in the batch: it goes on, and its client has seen nothing of it.
    (survivor,) = {"a", "b"} - set(ended)
    assert drive.tokens(survivor) == solo([ord(survivor), A], 20)
    drive.engine.submit(ask("again", [A] * 9, slot_id=0))
    drive.rest()
    assert drive.started("again").no_reuse == "the slot is empty"
    assert drive.tokens("again") == solo([A] * 9, 5)


def test_non_finite_logits_end_that_row_alone_and_are_not_kept() -> None:
    drive = Drive()
    drive.runner.poison = (B, B)
    drive.engine.submit(ask("bad", [B, B, A]))
    drive.engine.submit(ask("good", [A, A, A]))
    drive.rest()
    error = drive.error("bad")
    assert isinstance(error, EngineFault)
    assert isinstance(error.__cause__, NonFiniteLogits)
    assert drive.tokens("good") == solo([A, A, A], 5)
    assert sum(slot.held_tokens for slot in drive.engine.snapshot().slots) == 3 + 5 - 1


def test_a_failing_sampler_ends_that_row_and_keeps_its_pages() -> None:
    drive = Drive(failpoints=Failpoints({Site.SAMPLE: 1.0}))
    drive.engine.submit(ask("a", [A] * 9))
    drive.rest()
    error = drive.error("a")
    assert isinstance(error, EngineFault)
    assert isinstance(error.__cause__, InjectedFault)
    assert drive.engine.snapshot().slots[1].held_tokens == 9


def test_a_failure_at_admission_changes_no_slot() -> None:
    failpoints = Failpoints()
    drive = Drive(num_slots=1, failpoints=failpoints)
    drive.engine.submit(ask("first", [A] * 9))
    drive.rest()
    before = drive.engine.snapshot().slots
    failpoints.armed[Site.ADMIT] = 1.0
    drive.engine.submit(ask("second", [B] * 9))
    drive.rest()
    assert isinstance(drive.error("second"), EngineFault)
    assert drive.engine.snapshot().slots == before


def test_error_ids_differ() -> None:
    drive = Drive(failpoints=Failpoints({Site.RUN: 1.0}))
    for name in ("a", "b"):
        drive.engine.submit(ask(name))
    drive.rest()
    assert str(drive.error("a")) != str(drive.error("b"))
