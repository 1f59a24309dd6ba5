from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.requests import Request
from engine.step_timer import StepTimer
from engine.types import STEP_BOUNDS_S, StepTimes
from tests.unit.engine.drive import Drive


def test_nothing_was_timed_yet() -> None:
    assert StepTimer().times == StepTimes()


@pytest.mark.parametrize(
    ("seconds", "place"),
    [(0.0, 0), (0.001, 0), (0.0011, 1), (10.0, len(STEP_BOUNDS_S) - 1), (11.0, len(STEP_BOUNDS_S))],
)
def test_a_bound_belongs_to_the_class_that_it_ends(seconds: float, place: int) -> None:
    timer = StepTimer()
    timer.add(seconds)
    assert timer.times.counts.index(1) == place
    assert sum(timer.times.counts) == 1
    assert timer.times.total_s == seconds


def test_the_engine_times_the_steps_that_run_the_model() -> None:
    def slow(history: Sequence[int]) -> int:
        drive.clock.advance(0.2)
        return 5

    drive = Drive(next_token=slow)
    drive.steps(3)
    assert drive.engine.snapshot().step_times == StepTimes()
    drive.engine.submit(Request("a", (0, 5, 6), max_tokens=3))
    drive.rest()
    now = drive.engine.snapshot()
    assert sum(now.step_times.counts) == now.counters.steps == 3
    assert now.step_times.counts[STEP_BOUNDS_S.index(0.25)] == 3
    assert now.step_times.total_s == pytest.approx(0.6)
