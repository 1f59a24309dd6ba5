"""Threads beside the engine's own."""

from __future__ import annotations

import queue
import threading

import pytest

from engine.side_threads import FileThreads

PATIENCE_S = 30.0


def test_no_more_work_at_a_time_than_may_and_all_in_the_end() -> None:
    start = FileThreads(2)
    begun: queue.Queue[int] = queue.Queue()
    may_end = [threading.Event() for _ in range(4)]

    def work(number: int) -> None:
        begun.put(number)
        assert may_end[number].wait(PATIENCE_S)

    for number in range(4):
        start(lambda number=number: work(number))
    first = {begun.get(timeout=PATIENCE_S), begun.get(timeout=PATIENCE_S)}
    assert begun.empty()
    may_end[min(first)].set()
    third = begun.get(timeout=PATIENCE_S)
    assert begun.empty()
    may_end[max(first)].set()
    assert {*first, third, begun.get(timeout=PATIENCE_S)} == {0, 1, 2, 3}
    for each in may_end:
        each.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_work_that_fails_leaves_its_turn_to_others() -> None:
    start, done = FileThreads(1), threading.Event()
    failing: queue.Queue[threading.Thread] = queue.Queue()

    def fail() -> None:
        failing.put(threading.current_thread())
        raise RuntimeError("a fault")

    start(fail)
    start(done.set)
    assert done.wait(PATIENCE_S)
    # Its error is told after its turn has ended; told later it would be the next test's.
    failing.get(timeout=PATIENCE_S).join(PATIENCE_S)
