"""What the engine's thread waits for while nothing can go on, and that nothing else is missed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.errors import DeadlineExceeded, ShuttingDown
from engine.memory.planner import plan_memory
from engine.memory.split import PoolSizes
from engine.rebuild import RebuildState, RebuildWish
from engine.types import Cancelled, EngineConfig, Event, Failed, Finished
from tests.fakes import fake_engine, fake_shape, fitting_runner
from tests.slot_stores import fake_store, save_wish
from tests.unit.engine.drive import ask

_CONFIG = EngineConfig(context_tokens=256, num_slots=2, page_tokens=16)
# A hang guard, not an expectation.
_PATIENCE_S = 30.0


class Stalled:
    """A started engine of which a save holds slot 0, for as long as the test wants."""

    def __init__(self, root: Path) -> None:
        self._ends: queue.Queue[tuple[str, Event]] = queue.Queue()
        self._file_work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._waits = threading.Event()
        plan = plan_memory(_CONFIG, fake_shape(), 1 << 20)
        runner = fitting_runner(plan)
        self.engine = fake_engine(
            self._on_events,
            config=_CONFIG,
            runner=runner,
            clock=time.monotonic,
            start_file_work=self._file_work.put,
        )
        self._watch_waits()
        self.engine.start()
        self.save = save_wish(fake_store(root, runner, plan), 0, "a.slot")
        self.engine.transfer_slot(self.save)
        self._work: Callable[[], None] = self._file_work.get(timeout=_PATIENCE_S)

    def end_of(self, name: str) -> Event:
        ended, event = self._ends.get(timeout=_PATIENCE_S)
        assert ended == name
        return event

    def await_rest(self) -> None:
        """Returns once the engine waits, with all that was asked of it before taken in."""
        self.engine.command(self._waits.clear).result(_PATIENCE_S)
        assert self._waits.wait(_PATIENCE_S), "the engine takes step after step"

    def end_save(self) -> None:
        """Does, once, what a thread of file work would."""
        self._work()
        self._work = _nothing

    def _on_events(self, events: Sequence[tuple[str, Event]]) -> None:
        for name, event in events:
            if isinstance(event, Finished | Failed | Cancelled):
                self._ends.put((name, event))

    def _watch_waits(self) -> None:
        condition = self.engine._wake  # type: ignore[reportPrivateUsage]
        wait = condition.wait

        def watched(timeout: float | None = None) -> bool:
            self._waits.set()
            return wait(timeout)

        condition.wait = watched


def _nothing() -> None:
    """What is left of the file work once it is done."""


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Stalled]:
    it = Stalled(tmp_path)
    yield it
    it.engine.begin_stop()
    it.end_save()
    it.engine.join()
    assert it.engine.fault is None
    it.engine.check_integrity()


def test_who_waits_for_a_transfer_costs_no_steps_and_goes_on_at_its_end(stalled: Stalled) -> None:
    stalled.engine.submit(ask("a", slot_id=0))
    erased = stalled.engine.erase_slot(0)
    stalled.await_rest()
    stalled.end_save()
    assert isinstance(stalled.end_of("a"), Finished)
    assert stalled.save.done.result(_PATIENCE_S).slot_id == 0
    erased.result(_PATIENCE_S)


def test_others_are_served_beside_a_transfer_that_somebody_waits_for(stalled: Stalled) -> None:
    stalled.engine.submit(ask("a", slot_id=0))
    stalled.await_rest()
    stalled.engine.submit(ask("b"))
    assert isinstance(stalled.end_of("b"), Finished)
    stalled.await_rest()


def test_who_waits_for_a_transfer_ends_at_its_deadline(stalled: Stalled) -> None:
    stalled.engine.submit(ask("late", slot_id=0, deadline_s=time.monotonic() + 3600.0))
    deadline_s = time.monotonic() + 0.1
    stalled.engine.submit(ask("a", slot_id=0, deadline_s=deadline_s))
    end = stalled.end_of("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeadlineExceeded)
    stalled.await_rest()


def test_a_stop_reaches_who_waits_for_a_transfer(stalled: Stalled) -> None:
    stalled.engine.submit(ask("a", slot_id=0))
    stalled.await_rest()
    stalled.engine.begin_stop(grace_s=3600.0)
    end = stalled.end_of("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, ShuttingDown)


def test_a_stop_gives_up_a_transfer_when_its_time_is_over(stalled: Stalled) -> None:
    stalled.await_rest()
    stalled.engine.begin_stop(grace_s=0.1)
    assert isinstance(stalled.save.done.exception(_PATIENCE_S), ShuttingDown)


def test_a_drain_waits_for_a_transfer_without_steps_and_ends_with_it(stalled: Stalled) -> None:
    done = stalled.engine.rebuild(RebuildWish(PoolSizes(kv=40), "r", drain_s=3600.0))
    stalled.engine.submit(ask("a", slot_id=0))
    stalled.await_rest()
    stalled.end_save()
    assert done.result(_PATIENCE_S).current.kv == 40
    assert isinstance(stalled.end_of("a"), Finished)


def test_a_drain_ends_with_the_last_row() -> None:
    side: list[Callable[[], None]] = []
    engine = fake_engine(lambda _: None, start_compiling=side.append)
    engine.submit(ask("a", max_tokens=9))
    engine.step()
    done = engine.rebuild(RebuildWish(PoolSizes(kv=40), "r", drain_s=3600.0))
    engine.step()
    side.pop()()
    engine.step()
    assert engine.rebuilds.state is RebuildState.DRAINING
    engine.start()
    assert done.result(_PATIENCE_S).current.kv == 40
    engine.stop()
