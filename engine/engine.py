"""The engine's facade: one thread that owns the runner, and the doors to it.

Submit, cancel and erase are commands that the thread takes between steps, so the step boundary is
the only lock of everything behind it. Any thread may call the public methods. Knows no asyncio and
no transport: events leave through one callback per step.

Example:
    engine = Engine(config, plan, parts, sink=print)
    engine.start()
    engine.submit(Request("a", prompt=(1, 2, 3)))
    engine.stop(grace_s=5.0)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from engine.adapters.desk import AdapterDesk, EngineDoors
from engine.adapters.loaded import LoadedAdapters
from engine.engine_parts import EngineParts, request_limits, scheduler_parts
from engine.errors import (
    ContextOverflow,
    EngineError,
    EngineFault,
    NoSuchSlot,
    NotSupported,
    ShuttingDown,
)
from engine.memory.errors import RebuildFailed
from engine.memory.planner import MemoryPlan
from engine.pool_sleep import PoolSleep
from engine.pools import Pools
from engine.rebuild import (
    RebuildDoors,
    RebuildReport,
    Rebuilds,
    RebuildState,
    RebuildWish,
)
from engine.requests import Request
from engine.scheduler import Scheduler
from engine.scheduling.answers import Answers
from engine.scheduling.erasing import ErasedSlot, Erasure
from engine.scheduling.gate import Gate
from engine.scheduling.wishes import Restore, Save
from engine.slots.engine_calls import EngineCalls
from engine.snapshot import describe
from engine.step_timer import StepTimer
from engine.types import CancelCause, EngineConfig, Event, EventSink, Failed, Snapshot
from engine.validation import ENCODER_SLOTS, check_request

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Runs requests on one model."""

    def __init__(
        self, config: EngineConfig, plan: MemoryPlan, parts: EngineParts, *, sink: EventSink
    ) -> None:
        """Makes an engine that is not started; until then `step` may be called by hand."""
        # What is below `_wake` is shared with the callers' threads and guarded by it.
        self._wake = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._calls = EngineCalls(self._post_locked)
        self._answers = Answers()
        self.pools = Pools.of(config, plan, parts.runner, parts.memory, parts.experts)
        self._table, self._pages = self.pools.table, self.pools.pages
        self._clock = parts.clock
        self._new_error_id = parts.new_error_id
        self._loaded = LoadedAdapters(
            parts.adapters.store,
            parts.adapters.capacity,
            place_bytes=parts.adapters.place_bytes,
        )
        given = scheduler_parts(config, parts, self._loaded, self._calls)
        self._scheduler = Scheduler(given, self._table, self._pages)
        doors = EngineDoors(self.command, self._watch, self._scheduler.adapter_changes)
        self.adapters = AdapterDesk(parts.adapters, self._loaded, doors)
        self._step_timer = StepTimer()
        self._sink = sink
        self._limits = request_limits(config, plan, parts)
        self.rebuilds = Rebuilds(
            self._rebuild_doors(parts), parts.runner, self._table, self._pages, parts.failpoints
        )
        self._sleep = PoolSleep(config.sleep_idle_s, parts.runner, self._table, parts.clock)
        self._gate = Gate(max_requests=config.queue_requests, max_bytes=config.queue_bytes)
        self._pending: set[Future[Any]] = set()
        self._stop_at_s: float | None = None
        self._save_s = 0.0
        self._seen_stop_at_s: float | None = None  # the one that the last step knew of
        # Whether the last step did what was not told yet.
        self._holds = False
        self._untold: list[tuple[str, Event]] = []  # taken, but not known to be at the sink
        self._fault: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._snapshot = self._describe()

    @property
    def is_encoder(self) -> bool:
        """Whether the model reads texts and generates none, and so has no slots and adapters."""
        return self._limits.is_encoder

    @property
    def fault(self) -> BaseException | None:
        """What ended the engine thread unasked; None while all is well."""
        return self._fault

    def now_s(self) -> float:
        """Returns the time on the engine's clock, in which deadlines are given."""
        return self._clock()

    def snapshot(self) -> Snapshot:
        """Returns the state after the last step; refusals count at once."""
        with self._wake:
            now = self._snapshot
            counters = replace(now.counters, requests_refused=self._gate.num_refused)
        # Who was told that an adapter is loaded must find it here, before the next step.
        users = {one.adapter_id: one.active_requests for one in now.adapters}
        adapters = self._loaded.described(lambda adapter_id: users.get(adapter_id, 0))
        return replace(now, counters=counters, adapters=adapters)

    def start(self) -> None:
        """Starts the engine thread.

        Raises:
            RuntimeError: it was started before.
        """
        with self._wake:
            if self._thread is not None:
                raise RuntimeError("the engine was started before")
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, *, save: Save | None = None) -> None:
        """Queues a request; everything that becomes of it arrives at the sink.

        A warming request comes with the `save` that its prompt is computed for. That begins after
        the request has finished and has its own outcome.

        Raises:
            EngineError: it was refused, and no event will come: the errors of
                `engine.validation.check_request`, DuplicateRequest, QueueFull, ShuttingDown, or
                EngineFault if the engine has died.
        """
        try:
            check_request(request, replace(self._limits, adapter_ids=self._loaded.ids))
            with self._wake:
                self._refuse_if_closed()
                self._gate.enter(request)
                submitted_s = self._clock()
                if save is not None:
                    self._pending.add(save.done)
                self._post(lambda: self._scheduler.submit(request, submitted_s, save))
            if save is not None:
                save.done.add_done_callback(self._forget)
        except Exception as error:
            with self._wake:
                self._gate.num_refused += 1
                if isinstance(error, ContextOverflow) and self._is_open:
                    self._post(self._passing_over(request))
            raise

    @contextmanager
    def at_once(self) -> Generator[None]:
        """What the block submits reaches the same step: none begins before all are queued.

        The thread that runs steps waits meanwhile.
        """
        with self._wake:
            yield

    def cancel(self, request_id: str, cause: CancelCause) -> None:
        """Ends a request before the next step; an id that is not in flight is ignored."""
        with self._wake:
            self._post(lambda: self._scheduler.cancel(request_id, cause))

    def erase_slot(
        self, slot_id: int, *, fail_if_busy: bool = False, tenant: str | None = None
    ) -> Future[ErasedSlot]:
        """Frees what a slot holds, once no request uses it; cancel the future to stop waiting.

        A `tenant` may erase only its own content; None may erase any. The future raises SlotBusy,
        SlotContentNotFound (another tenant's), ShuttingDown or EngineFault.

        Raises:
            NoSuchSlot: there is no slot with this id.
            NotSupported: the model is an encoder.
            EngineError: ShuttingDown or EngineFault, as `submit`.
        """
        self._check_slot(slot_id)
        done: Future[ErasedSlot] = Future()
        erasure = Erasure(slot_id, fail_if_busy, tenant, done)
        self._watch(done, lambda: self._scheduler.erase(erasure))
        return done

    def awake(self) -> Future[None]:
        """Wakes pools that sleep, as every command does; the future is done once they are there.

        Raises:
            EngineError: ShuttingDown or EngineFault, as `submit`.
        """
        done: Future[None] = Future()
        self._watch(done, lambda: self._answers.keep_if_wanted(done, None))
        return done

    def command(self, work: Callable[[], T]) -> Future[T]:
        """Runs work on the engine thread between two steps.

        The future gets its result, or the EngineError that it raises; whatever else it raises ends
        the engine. Cancel the future to give up before it runs.

        Raises:
            EngineError: ShuttingDown or EngineFault, as `submit`.
        """
        done: Future[T] = Future()
        self._watch(done, partial(_settle, done, work))
        return done

    def transfer_slot(self, wish: Save | Restore) -> None:
        """Saves or restores a slot, once no request uses it; the outcome comes in `wish.done`.

        That raises SlotBusy, SlotContentNotFound, the errors of slot files, KvPagesExhausted,
        ShuttingDown or EngineFault. Cancel it to give up: the file, or the slot, stays as it was.

        Raises:
            NoSuchSlot: there is no slot with this id.
            NotSupported: the model is an encoder.
            EngineError: ShuttingDown or EngineFault, as `submit`.
        """
        self._check_slot(wish.slot_id)
        self._watch(wish.done, lambda: self._scheduler.transfer(wish))

    def rebuild(self, wish: RebuildWish) -> Future[RebuildReport]:
        """Gives pools other sizes; see `engine.rebuild.Rebuilds.ask` for the future's outcome.

        Raises:
            EngineError: ShuttingDown, RebuildFailed or EngineFault, as `submit`.
        """
        done: Future[RebuildReport] = Future()
        self._watch(done, lambda: self.rebuilds.ask(wish, done))
        # Who gives up wakes the engine, which may be waiting for the end of a drain.
        done.add_done_callback(lambda _: self._post_locked(lambda: None))
        return done

    def _rebuild_doors(self, parts: EngineParts) -> RebuildDoors:
        return RebuildDoors(
            split=self.pools.split,
            num_experts=lambda: self.pools.experts()[0].cached if self.pools.experts else 0,
            num_rows=lambda: len(self._scheduler.rows),
            num_transfers=lambda: self._scheduler.num_transfers,
            set_open=partial(setattr, self._scheduler, "is_open"),
            post=self._post_locked,
            start=parts.start_compiling,
            on_resized=self._on_resized,
            on_failed=self._on_pools_lost,
            clock=parts.clock,
            available_bytes=parts.available_bytes,
        )

    def _on_resized(self) -> None:
        with self._wake:
            self._limits = replace(self._limits, kv_pages=self._pages.size)
        self._scheduler.refuse_too_long()

    def _on_pools_lost(self) -> None:
        self._table.empty_all()
        failed_in = self.rebuilds.failed_in
        self._scheduler.refuse_waiting(lambda: RebuildFailed(failed_in), begun_too=True)

    def begin_stop(self, grace_s: float = 0.0, *, save_s: float = 0.0) -> None:
        """Asks for the end: what waits fails with ShuttingDown, what runs may go on for `grace_s`.

        Then the rest is cancelled. Requests are cancelled `save_s` earlier, so that their slots
        can still be saved. Waits for nothing; may be called again with less time.
        """
        stop_at_s = self._clock() + grace_s
        with self._wake:
            if self._stop_at_s is None or stop_at_s < self._stop_at_s:
                self._stop_at_s = stop_at_s
                self._save_s = save_s
            self._wake.notify_all()

    def stop(self, grace_s: float = 0.0, *, save_s: float = 0.0) -> None:
        """Ends the engine: `begin_stop`, then `join`."""
        self.begin_stop(grace_s, save_s=save_s)
        self.join()

    def join(self) -> None:
        """Returns once an engine that was asked to stop has ended."""
        with self._wake:
            thread = self._thread
        if thread is None:
            self._run()
        else:
            thread.join()

    def step(self, *, may_hold: bool = False) -> bool:
        """Takes the commands and runs one step; False when the engine has stopped.

        For the engine thread, or for a test that drives an engine that was never started. With
        `may_hold` what it did may be told in the next step only, while the device computes that.
        """
        with self._wake:
            commands, self._inbox = self._inbox, []
            stop_at_s = self._seen_stop_at_s = self._stop_at_s
        if commands and self._holds:
            self._tell()  # who gets an answer from a command must find what was done before it
        failed_to_wake = self._sleep.wake() if commands else None
        for command in commands:
            command()
        if failed_to_wake is not None:
            self._scheduler.refuse_waiting(lambda: self._fault_of(failed_to_wake), begun_too=True)
        if stop_at_s is not None:
            self._scheduler.refuse_waiting(ShuttingDown)
            self.rebuilds.stop(ShuttingDown)
            if self._clock() >= stop_at_s - self._save_s:
                self._scheduler.cancel_all(CancelCause.SHUTDOWN)
            if self._clock() >= stop_at_s:
                self._scheduler.stop_transfers(ShuttingDown)
        self.rebuilds.run()
        began_s = self._clock()
        has_begun = self._scheduler.begin_step()
        if may_hold:
            self._tell()
        if has_begun:
            self._scheduler.finish_step()
            self._step_timer.add(self._clock() - began_s)
        if commands or self._is_busy():
            self._sleep.stay_awake()
        else:
            self._sleep.fall_asleep_if_due()
        self._holds = may_hold and self._scheduler.is_flowing and not self.rebuilds.is_running
        if not self._holds:
            self._tell()
        with self._wake:
            # Nothing new gets in once a stop was asked for, so an idle engine stays idle.
            is_over = self._stop_at_s is not None and not self._scheduler.has_work
            return not (is_over and not self._inbox and not self._scheduler.num_transfers)

    def _tell(self) -> None:
        """Publishes what was done: lists and metrics first, then who waits for it."""
        events = self._untold = self._scheduler.take_events()
        with self._wake:
            self._gate.settle(events)
            self._snapshot = self._describe()
        self._holds = False
        self.rebuilds.tell()
        self._scheduler.tell()
        self._answers.tell()
        if events:
            self._sink(events)
        self._untold = []

    def check_integrity(self) -> None:
        """Proves the books of the pools; only between steps.

        Raises:
            engine.memory.pages.PoolCorruption: they do not add up.
        """
        self._table.check_integrity()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    # What is waited for changes its end too: a stop may be asked for meanwhile.
                    while not self._is_wanted() and self._wake.wait(self._patience()):
                        pass
                if not self.step(may_hold=True):
                    self._calls.close(ShuttingDown)
                    return
        except BaseException as error:
            _log.critical("the engine thread died", exc_info=error)
            self._die(error)

    def _is_busy(self) -> bool:
        is_moving = self.rebuilds.is_running or self._scheduler.num_transfers > 0
        return is_moving or self._scheduler.has_work

    def _is_wanted(self) -> bool:
        """Whether to take a step now; whatever makes it so later notifies `_wake` or has a time.

        A stop notifies, and the inbox takes everything else: requests, the pieces and the ends of
        transfers, compiled programs, rebuilds that are given up. Times are those of `_patience`.
        """
        if self._inbox or self.rebuilds.has_work or self._stop_at_s != self._seen_stop_at_s:
            return True
        if self._scheduler.has_work and not self._scheduler.is_stalled:
            return True
        # After a stop it goes on until nothing runs; transfers report when they are through.
        return self._stop_at_s is not None and not self._scheduler.num_transfers

    def _patience(self) -> float | None:
        """How long to wait at most: for a deadline, a stop, the end of a drain, or sleep."""
        times = [self.rebuilds.next_deadline_s, self._sleep.due_s, self._stop_at_s]
        if self._scheduler.num_waiting:
            times.append(self._scheduler.next_deadline_s)
            if self._stop_at_s is not None:
                times.append(self._stop_at_s - self._save_s)
        ends = [at for at in times if at is not None]
        return max(0.0, min(ends) - self._clock()) if ends else None

    def _die(self, cause: BaseException) -> None:
        """Fails everything in flight: a dead engine must not leave anybody waiting."""
        with self._wake:
            self._fault = cause
            self._inbox = []
            pending = list(self._pending)
            more = self._scheduler.take_events()
            self._gate.settle(more)  # the untold ones are settled
            ended = [(name, Failed(self._death())) for name in self._gate.in_flight]
            self._gate.settle(ended)
        self._calls.close(self._death)
        for done in pending:
            if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
                done.set_exception(self._death())
        try:
            self._sink([*self._untold, *more, *ended])
        except Exception as error:
            _log.critical("nobody heard of the failure of %d requests", len(ended), exc_info=error)

    def _death(self) -> EngineFault:
        return self._fault_of(self._fault)

    def _fault_of(self, cause: BaseException | None) -> EngineFault:
        fault = EngineFault(self._new_error_id())
        fault.__cause__ = cause
        return fault

    def _passing_over(self, request: Request) -> Callable[[], None]:
        # A slot holds less than a context: the rest of the prompt need not be kept until then.
        short = replace(request, prompt=request.prompt[: self._limits.context_tokens])
        return lambda: self._scheduler.pass_over(short)

    @property
    def _is_open(self) -> bool:
        return self._fault is None and self._stop_at_s is None

    def _refuse_if_closed(self) -> None:
        if self._fault is not None:
            raise self._death()
        if self._stop_at_s is not None:
            raise ShuttingDown
        if self.rebuilds.state is RebuildState.FAILED:
            raise RebuildFailed(self.rebuilds.failed_in)

    def _post(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.notify_all()

    def _watch(self, done: Future[Any], command: Callable[[], None]) -> None:
        """Posts a command that answers a future, which is answered even if the engine dies."""
        with self._wake:
            self._refuse_if_closed()
            self._pending.add(done)
            self._post(command)
        done.add_done_callback(self._forget)

    def _forget(self, done: Future[Any]) -> None:
        with self._wake:
            self._pending.discard(done)

    def _post_locked(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._post(command)

    def _check_slot(self, slot_id: int) -> None:
        if self._limits.is_encoder:
            raise NotSupported(ENCODER_SLOTS)
        if not 0 <= slot_id < self._limits.num_slots:
            raise NoSuchSlot(slot_id, self._limits.num_slots)

    def _describe(self) -> Snapshot:
        now = describe(self._scheduler, self.pools, self._gate.max_requests)
        return replace(
            now,
            step_times=self._step_timer.times,
            adapters=self._loaded.described(self._scheduler.num_users),
            is_asleep=self._sleep.is_asleep,
        )


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except EngineError as error:
        done.set_exception(error)
    else:
        done.set_result(result)
