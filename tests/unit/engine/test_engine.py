from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from engine.errors import (
    ContextOverflow,
    DuplicateRequest,
    EngineFault,
    NoSuchSlot,
    QueueFull,
    ShuttingDown,
    SlotBusy,
    SlotContentNotFound,
    TokenNotInVocab,
)
from engine.requests import Request
from engine.step import StepBatch
from engine.types import (
    CancelCause,
    Cancelled,
    Chunk,
    EngineConfig,
    Event,
    Failed,
    Finished,
    Started,
)
from tests.fake_runner import FakeRunner, FakeStep
from tests.fakes import FakeClock, fake_engine
from tests.unit.engine.drive import Drive

A = 67


def ask(name: str, max_tokens: int | None = 5, *, slot_id: int | None = None) -> Request:
    return Request(name, (A, A, A), max_tokens=max_tokens, ignore_eos=True, slot_id=slot_id)


class Threaded:
    """A started engine whose last events can be waited for."""

    def __init__(self, *, runner: FakeRunner | None = None, clock: FakeClock | None = None) -> None:
        self.events: list[tuple[str, Event]] = []
        self.ends: queue.Queue[tuple[str, Event]] = queue.Queue()
        config = EngineConfig(context_tokens=256, num_slots=2, page_tokens=16)
        self.engine = fake_engine(self._on_events, config=config, runner=runner, clock=clock)
        self.engine.start()

    def _on_events(self, events: Sequence[tuple[str, Event]]) -> None:
        self.events += events
        for name, event in events:
            if isinstance(event, Finished | Failed | Cancelled):
                self.ends.put((name, event))

    def next_end(self) -> tuple[str, Event]:
        return self.ends.get(timeout=30)


def make_runner() -> FakeRunner:
    """A runner that fits the configuration of `Threaded`."""
    return FakeRunner(num_pages=18, page_tokens=16)


# The thread.


def test_requests_of_many_threads_all_end() -> None:
    threaded = Threaded()
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(threaded.engine.submit, ask(f"r{i}")) for i in range(40)]:
            done.result(timeout=30)
    ends = dict(threaded.next_end() for _ in range(40))
    assert set(ends) == {f"r{i}" for i in range(40)}
    assert all(isinstance(end, Finished) for end in ends.values())
    threaded.engine.stop()
    threaded.engine.check_integrity()


def test_an_idle_engine_takes_no_steps() -> None:
    runner = make_runner()
    threaded = Threaded(runner=runner)
    threaded.engine.submit(ask("a"))
    threaded.next_end()
    steps = threaded.engine.snapshot().counters.steps
    threaded.engine.erase_slot(0).result(timeout=30)
    assert threaded.engine.snapshot().counters.steps == steps
    threaded.engine.stop()


def test_it_starts_once() -> None:
    threaded = Threaded()
    with pytest.raises(RuntimeError, match="started before"):
        threaded.engine.start()
    threaded.engine.stop()


def test_stop_ends_the_thread_and_refuses_what_comes_later() -> None:
    threaded = Threaded()
    threaded.engine.stop()
    assert "engine" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ShuttingDown):
        threaded.engine.submit(ask("late"))
    with pytest.raises(ShuttingDown):
        threaded.engine.erase_slot(0)
    threaded.engine.cancel("late", CancelCause.CLIENT)
    threaded.engine.stop()


def test_stop_while_requests_run_leaves_nothing_behind() -> None:
    threaded = Threaded()
    for name in ("a", "b", "c"):
        threaded.engine.submit(ask(name, None))
    threaded.engine.stop()
    assert sorted(threaded.next_end()[0] for _ in range(3)) == ["a", "b", "c"]
    (pool,) = threaded.engine.snapshot().pools
    assert pool.used == 0
    threaded.engine.check_integrity()


def test_a_dying_thread_fails_everything_and_says_so() -> None:
    runs, hold = threading.Event(), threading.Event()
    runner = make_runner()

    def hang(_: object) -> None:
        runs.set()
        assert hold.wait(30)
        raise SystemExit("the device driver gave up")

    runner.on_run = hang
    threaded = Threaded(runner=runner)
    threaded.engine.submit(ask("runs", slot_id=0))
    assert runs.wait(30)
    threaded.engine.submit(ask("waits", slot_id=0))
    erased = threaded.engine.erase_slot(0)
    assert threaded.engine.fault is None
    hold.set()
    ends = dict(threaded.next_end() for _ in range(2))
    for name in ("runs", "waits"):
        end = ends[name]
        assert isinstance(end, Failed)
        assert isinstance(end.error, EngineFault)
        assert isinstance(end.error.__cause__, SystemExit)
    assert isinstance(erased.exception(timeout=30), EngineFault)
    threaded.engine.stop()
    assert isinstance(threaded.engine.fault, SystemExit)
    with pytest.raises(EngineFault):
        threaded.engine.submit(ask("late"))
    with pytest.raises(EngineFault):
        threaded.engine.erase_slot(0)


@pytest.mark.parametrize("at", ["snapshot", "answer", "sink"])
def test_what_was_not_told_when_the_thread_died_is_told_first(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    told: list[tuple[str, Event]] = []
    refused: list[bool] = []

    def refuse(*_: object) -> None:
        raise SystemExit(f"a fault in the {at}")

    def listen(events: Sequence[tuple[str, Event]]) -> None:
        if at == "sink" and ("ends", Finished) in [(n, type(e)) for n, e in events] and not refused:
            refused.append(True)
            refuse()
        told.extend(events)

    def finish() -> None:
        if at == "snapshot":
            monkeypatch.setattr("engine.engine.describe", refuse)
        elif at == "answer":
            monkeypatch.setattr("engine.scheduling.answers.Answers.tell", refuse)

    runner = make_runner()
    config = EngineConfig(context_tokens=256, num_slots=2, page_tokens=16)
    engine = fake_engine(listen, config=config, runner=runner)
    engine.submit(ask("goes on", None))
    engine.step()
    engine.submit(ask("ends", 2))
    engine.step()
    runner.on_run = lambda _: finish()
    engine.start()
    engine.join()
    assert isinstance(engine.fault, SystemExit)
    of = {name: [type(e) for n, e in told if n == name] for name in ("ends", "goes on")}
    assert of["ends"] == [Started, Chunk, Chunk, Finished]
    assert of["goes on"][-1] is Failed


def test_a_failing_sink_is_a_fault() -> None:
    def fail(_: object) -> None:
        raise OSError("nobody listens")

    engine = fake_engine(fail)
    engine.start()
    engine.submit(ask("a"))
    engine.stop(grace_s=30.0)
    assert isinstance(engine.fault, OSError)


# Doors, driven by hand.


def test_a_refusal_is_raised_counted_and_leaves_no_trace() -> None:
    drive = Drive(num_slots=1, queue_requests=1)
    drive.engine.submit(ask("a", None))
    with pytest.raises(QueueFull) as refusal:
        drive.engine.submit(ask("b"))
    assert (refusal.value.queued, refusal.value.limit) == (1, 1)
    drive.steps()
    with pytest.raises(DuplicateRequest):
        drive.engine.submit(ask("a"))
    with pytest.raises(TokenNotInVocab):
        drive.engine.submit(Request("c", (10_000,)))
    drive.engine.submit(ask("b"))
    assert drive.engine.snapshot().counters.requests_refused == 3
    drive.rest()
    assert {name for name, _ in drive.events} == {"a", "b"}


# Source: llama.cpp refuses a prompt for its length after it has given it a slot.
@pytest.mark.parametrize("pinned", [None, 1])
def test_a_prompt_refused_for_its_length_has_used_its_slot(pinned: int | None) -> None:
    drive = Drive()
    with pytest.raises(ContextOverflow):
        drive.engine.submit(Request("long", (A,) * 64, slot_id=pinned))
    drive.engine.submit(ask("next"))
    drive.rest()
    assert drive.started("next").slot_id == 0
    assert drive.of("long") == []


def test_a_prompt_refused_for_its_length_leaves_content_and_running_requests_alone() -> None:
    drive = filled(Drive(num_slots=1))
    with pytest.raises(ContextOverflow):
        drive.engine.submit(Request("long", (A + 1,) * 64))
    drive.engine.submit(ask("again"))
    drive.steps()
    with pytest.raises(ContextOverflow):
        drive.engine.submit(Request("long", (A + 1,) * 64))
    drive.rest()
    assert drive.started("again").cached_tokens == 2
    assert isinstance(drive.end("again"), Finished)


class Watched(Drive):
    """An engine that may hold what it tells, and what happened in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        start = self.runner.start

        def logged(batch: StepBatch) -> FakeStep:
            step = start(batch)
            self.log.append("start")
            return FakeStep(lambda: [self.log.append("results"), *step.results()][1:])

        self.runner.start = logged

    def step(self) -> list[str]:
        """Returns what happens in one step as the engine's own thread takes it."""
        self.log.clear()
        self.engine.step(may_hold=True)
        return list(self.log)

    def _on_events(self, events: Sequence[tuple[str, Event]]) -> None:
        super()._on_events(events)
        self.log += [type(event).__name__ for _, event in events]


def test_what_a_step_did_is_told_while_the_device_has_the_next_one() -> None:
    watched = Watched()
    watched.engine.submit(ask("a", 3))
    assert watched.step() == ["start", "Started", "results"]
    assert watched.step() == ["start", "Chunk", "results"]
    # The last one is followed by none, so nothing waits for it.
    assert watched.step() == ["start", "Chunk", "results", "Chunk", "Finished"]


def test_a_command_finds_everything_told_that_was_done_before_it() -> None:
    watched = Watched()
    engine = watched.engine
    engine.submit(ask("a"))
    watched.step()
    done = engine.command(
        lambda: (len(watched.chunks("a")), engine.snapshot().counters.generated_tokens)
    )
    watched.step()
    assert done.result() == (1, 1)


def test_nothing_is_held_while_something_else_waits() -> None:
    watched = Watched()
    watched.engine.submit(ask("a", None, slot_id=0))
    watched.step()
    watched.engine.erase_slot(0)  # waits for the request
    assert watched.step() == ["Chunk", "start", "results", "Chunk"]


def test_an_id_may_come_again_after_its_end() -> None:
    drive = Drive()
    for _ in range(2):
        drive.engine.submit(ask("a"))
        drive.rest()
    assert drive.engine.snapshot().counters.requests_finished == 2


def test_cancel_right_after_submit() -> None:
    drive = Drive()
    drive.engine.submit(ask("a"))
    drive.engine.cancel("a", CancelCause.CLIENT)
    drive.steps()
    assert drive.of("a") == [Cancelled(CancelCause.CLIENT)]


def test_now_is_the_engines_clock() -> None:
    drive = Drive()
    drive.clock.advance(5)
    assert drive.engine.now_s() == drive.clock.now_s


# Erase.


def filled(drive: Drive) -> Drive:
    drive.engine.submit(ask("fills", 6))
    return drive.rest()


def test_erase_frees_what_the_slot_held() -> None:
    drive = filled(Drive())
    done = drive.engine.erase_slot(1)
    drive.steps()
    erased = done.result(timeout=0)
    assert (erased.slot_id, erased.tokens, erased.pages) == (1, 8, 2)
    (pool,) = drive.engine.snapshot().pools
    assert pool.free == pool.size
    drive.engine.submit(ask("again"))
    drive.rest()
    assert drive.started("again").cached_tokens == 0


def test_erase_of_an_empty_slot_gives_nothing_back() -> None:
    drive = Drive()
    done = drive.engine.erase_slot(0)
    drive.steps()
    assert (done.result(timeout=0).tokens, done.result(timeout=0).pages) == (0, 0)


def test_erase_waits_for_a_busy_slot() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", 6))
    drive.steps()
    done = drive.engine.erase_slot(1)
    drive.steps()
    assert not done.done()
    drive.rest()
    drive.steps()
    assert done.result(timeout=0).tokens == 8
    assert drive.finished("a").completion_tokens == 6


def test_erase_of_a_busy_slot_may_refuse_to_wait() -> None:
    drive = Drive()
    drive.engine.submit(ask("a"))
    drive.steps()
    done = drive.engine.erase_slot(1, fail_if_busy=True)
    drive.steps()
    with pytest.raises(SlotBusy, match="slot 1 is busy with request 'a'"):
        done.result(timeout=0)


def test_a_waiting_erase_can_be_given_up() -> None:
    drive = Drive()
    drive.engine.submit(ask("a", 6))
    drive.steps()
    done = drive.engine.erase_slot(1)
    drive.steps()
    assert done.cancel()
    drive.rest()
    with pytest.raises(CancelledError):
        done.result(timeout=0)
    assert drive.engine.snapshot().slots[1].held_tokens == 8


@pytest.mark.parametrize("slot_id", [-1, 2])
def test_erase_of_an_unknown_slot(slot_id: int) -> None:
    with pytest.raises(NoSuchSlot):
        Drive().engine.erase_slot(slot_id)


def test_another_tenants_content_cannot_be_erased_nor_seen() -> None:
    drive = filled(Drive())
    done = drive.engine.erase_slot(1, tenant="other")
    drive.steps()
    with pytest.raises(SlotContentNotFound, match="slot 1 holds nothing of this caller's"):
        done.result(timeout=0)
    assert drive.engine.snapshot().slots[1].held_tokens == 8
    done = drive.engine.erase_slot(1, tenant="")
    drive.steps()
    assert done.result(timeout=0).tokens == 8


# Stop, driven by hand.


def test_stop_fails_what_waits_and_lets_what_runs_finish() -> None:
    drive = Drive(num_slots=1)
    drive.engine.submit(ask("runs", 6))
    drive.steps()
    drive.engine.submit(ask("waits"))
    erase = drive.engine.erase_slot(0)
    drive.engine.stop(grace_s=60.0)
    assert drive.finished("runs").completion_tokens == 6
    assert isinstance(drive.error("waits"), ShuttingDown)
    assert isinstance(erase.exception(timeout=0), ShuttingDown)


def test_stop_cancels_what_runs_when_the_grace_is_over() -> None:
    drive = Drive(num_slots=1, context_tokens=60)
    drive.runner.on_run = lambda _: drive.clock.advance(1.0)
    drive.engine.submit(ask("runs", None))
    drive.steps()
    drive.engine.stop(grace_s=3.0)
    assert drive.end("runs") == Cancelled(CancelCause.SHUTDOWN)
    assert 3 <= len(drive.tokens("runs")) <= 5


def test_a_preempted_request_counts_as_running_at_stop() -> None:
    drive = Drive(num_slots=2, kv_pages=10)
    for name, token in (("older", A), ("younger", A + 1)):
        drive.engine.submit(Request(name, (token,) * 8, max_tokens=25, ignore_eos=True))
    while drive.engine.snapshot().counters.preemptions == 0:
        drive.steps()
    drive.engine.stop(grace_s=60.0)
    for name in ("older", "younger"):
        assert drive.finished(name).completion_tokens == 25
