"""Between the event loop and the engine thread: requests go down, events come up.

One `call_soon_threadsafe` per engine step carries all of the step's events; each call has one
queue, and the engine never waits for it. Everything here but `_sink` runs on the event loop. It
must not know a message or a status.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from engine.engine import Engine
from engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    ModelLoading,
    ShuttingDown,
)
from engine.requests import Request
from engine.scheduling.erasing import ErasedSlot
from engine.scheduling.wishes import Restore, RestoredSlot, Save, SavedSlot
from engine.totals import Totals
from engine.types import CancelCause, Cancelled, Embedded, Event, Failed, Finished, Snapshot
from service.call_groups import Place
from service.changes import Changes
from service.loaded import LoadedModel, LoadModel
from service.tenure import Tenure
from service.waiting_room import WaitingRoom


@dataclass(frozen=True)
class BridgeHooks:
    """Who is told what: the cause of every cancellation, and the death of the served engine."""

    on_cancelled: Callable[[CancelCause], None]
    on_fault: Callable[[BaseException], None]


@dataclass(frozen=True)
class Served:
    """What is served: its number, from 1, and name; `is_changing`: it was, until just now."""

    number: int
    model_id: str
    is_changing: bool = False


@dataclass(eq=False)
class _Stream:
    """One call: its queue, and which of its requests the engine still knows.

    The queue needs no bound of its own, since the engine sends at most a Chunk per token of the
    budget and a Progress per token of the prompt.
    """

    queue: asyncio.Queue[tuple[int, Event]] = field(
        default_factory=asyncio.Queue[tuple[int, Event]]
    )
    running: set[str] = field(default_factory=set[str])
    is_closed: bool = False


@dataclass(frozen=True)
class _Books:
    """The models whose engine runs, the served one too, and what those before did in all.

    Replaced whole: a scrape on another thread must not count an engine twice, nor miss one.
    """

    tenures: tuple[Tenure, ...] = ()
    past: Totals = field(default_factory=Totals)

    def without(self, tenure: Tenure) -> _Books:
        """After the end of an engine."""
        done = Totals.of(tenure.model.engine.snapshot())
        left = tuple(one for one in self.tenures if one is not tenure)
        return _Books(left, self.past.plus(done))


class Bridge:
    """Owns engines from load to stop, and routes events to the calls that wait for them.

    One model is served; those before it stay until the calls that began on them have ended. While
    there is none to serve calls are answered ModelLoading, but those that can wait for the next one
    do while it is on its way.
    """

    def __init__(self, hooks: BridgeHooks, room: WaitingRoom) -> None:
        """Must be called on the event loop that serves; `room` bounds what waits for a model."""
        self._hooks = hooks
        self._room = room
        self._loop = asyncio.get_running_loop()
        self.changes = Changes()
        self._served: Tenure | None = None
        self._books = _Books()
        # The last one that was shown, also while nothing is served.
        self._shown = Served(0, "")
        self._is_suspended = False
        self._has_changed = asyncio.Event()
        self._is_stopping = False
        self._dead: set[Tenure] = set()
        # By request id, until the engine's last event: a call that has gone away keeps its entry,
        # so that what is still on its way cannot reach a later request of the same id.
        self._streams: dict[str, tuple[_Stream, int]] = {}

    async def load(self, load_model: LoadModel) -> LoadedModel:
        """Builds the first model and serves it.

        Raises:
            ShuttingDown: The server was stopped meanwhile.
            Exception: Whatever the loader raises; the bridge stays without a model.
        """
        model = await self.build(load_model)
        self.serve(model)
        return model

    async def build(self, load_model: LoadModel) -> LoadedModel:
        """Builds a model on a thread; its engine is not started.

        Raises:
            Exception: Whatever the loader raises.
        """
        return await _on_own_thread(lambda: load_model(self._sink))

    def serve(self, model: LoadedModel) -> Tenure | None:
        """Starts a model's engine and serves it to who comes from now on.

        Returns:
            The one before, which its calls go on with: `retire` it.

        Raises:
            ShuttingDown: The server was stopped meanwhile.
        """
        if self._is_stopping:
            raise ShuttingDown
        model.engine.start()
        before, tenure = self._served, Tenure(model)
        self._books = replace(self._books, tenures=(*self._books.tenures, tenure))
        self._show(tenure)
        return before

    def suspend(self) -> Tenure:
        """Serves nothing until `serve`, `resume` or `lose`; returns what was served.

        Raises:
            EngineError: Nothing is.
        """
        tenure = self._current
        self._served, self._is_suspended = None, True
        self._wake()
        return tenure

    def resume(self, tenure: Tenure) -> None:
        """Serves again what was suspended; its slots are as they were."""
        self._served, self._is_suspended = tenure, False
        self._wake()
        self._look_for_faults()

    def lose(self) -> None:
        """Lets nobody wait any longer: what was suspended is not coming back."""
        self._is_suspended = False
        self._wake()

    async def retire(self, tenure: Tenure) -> None:
        """Ends the engine of a model that is not served any more, once no call uses it."""
        await tenure.unused()
        await asyncio.to_thread(tenure.model.engine.stop)
        self._books = self._books.without(tenure)
        self._dead.discard(tenure)

    async def tenures(self) -> AsyncGenerator[Served]:
        """Yields what is served, then each turn: it is being changed, and what is served then.

        Raises:
            EngineError: Nothing is served and nothing on its way, or the server stops.
        """
        told: Served | None = None
        while True:
            if self._is_stopping or not self._is_suspended:
                _ = self._current
            now = replace(self._shown, is_changing=self._is_suspended)
            if told != now:
                told = now
                yield now
                continue
            await self._has_changed.wait()

    @property
    def model(self) -> LoadedModel:
        """The model that is served.

        Raises:
            ModelLoading: There is none yet.
            ShuttingDown: The server stops.
        """
        return self._current.model

    @property
    def engine(self) -> Engine:
        """The model's engine; raises as `model` does."""
        return self.model.engine

    def snapshot(self) -> Snapshot | None:
        """Returns what the served engine's last step published, None while there is none.

        Requests and totals are those of all engines that there have been.
        """
        books, served = self._books, self._served
        if served is None:
            return None
        totals, running, queued = books.past, 0, 0
        for tenure in books.tenures:
            snapshot = tenure.model.engine.snapshot()
            totals = totals.plus(Totals.of(snapshot))
            running, queued = running + snapshot.running, queued + snapshot.queued
        return replace(totals.over(served.model.engine.snapshot()), running=running, queued=queued)

    def name(self) -> str:
        """Returns what the served model is called, "" while there is none."""
        served = self._served
        return "" if served is None else served.model.names.model_id

    @contextmanager
    def use(self) -> Generator[LoadedModel]:
        """Gives the model that is served and keeps its engine until the block ends.

        Raises:
            EngineError: As `model`.
        """
        with self._current.using() as model:
            yield model

    @asynccontextmanager
    async def admit(self, size: int) -> AsyncGenerator[LoadedModel]:
        """As `use`, of a call of `size` bytes that waits while the model is changed.

        Raises:
            EngineError: As `model`, and QueueFull: too many wait.
        """
        await self._settled(size)
        with self.use() as model:
            yield model

    async def events(
        self,
        requests: Sequence[Request],
        cause: Callable[[], CancelCause] = lambda: CancelCause.CLIENT,
        *,
        save: Save | None = None,
        model: LoadedModel | None = None,
        place: Place | None = None,
    ) -> AsyncGenerator[tuple[int, Event]]:
        """Runs the samples of one call and yields (sample, event) until each has finished.

        With `save` the only one is a prompt that is computed to be saved. `model` is the one that
        the requests were made for and their caller uses, None what is served. With a `place` they
        are queued when its group is.

        Closing the generator, for whatever reason, cancels what still runs; `cause` is then asked
        for the reason.

        Raises:
            EngineError: A sample was refused, failed, expired or was cancelled; the others then
                are cancelled too.
        """
        engine = (model or self.model).engine
        stream = _Stream()
        num_left = len(requests)

        def submit() -> None:
            with engine.at_once():
                for sample, request in enumerate(requests):
                    self._submit(engine, stream, sample, request, save)

        try:
            if place is None:
                submit()
            else:
                await place.take(submit)
            while num_left:
                sample, event = await stream.queue.get()
                _raise_if_over(event)
                yield sample, event
                num_left -= isinstance(event, Finished | Embedded)
        finally:
            stream.is_closed = True
            for request_id in stream.running:
                engine.cancel(request_id, cause())

    async def awake(self, size: int) -> LoadedModel:
        """Returns the model once its pools do not sleep: for calls that count as use.

        A call of `size` bytes waits while the model is changed.

        Raises:
            EngineError: It is not there yet, as `admit`, or as `Engine.awake`.
        """
        await self._settled(size)
        model = self.model
        if model.engine.snapshot().is_asleep:
            await asyncio.wrap_future(model.engine.awake())
        return model

    async def erase(self, slot_id: int, *, fail_if_busy: bool, tenant: str | None) -> ErasedSlot:
        """Empties a slot once no request uses it; giving up the wait leaves it as it is.

        Raises:
            EngineError: As `Engine.erase_slot` and its future.
        """
        with self.use() as model:
            done = model.engine.erase_slot(slot_id, fail_if_busy=fail_if_busy, tenant=tenant)
            return await asyncio.wrap_future(done)

    async def save(self, save: Save, model: LoadedModel) -> SavedSlot:
        """Saves a slot once no request uses it; giving up leaves the file as it was.

        Raises:
            EngineError: As `Engine.transfer_slot`.
        """
        model.engine.transfer_slot(save)
        return await self.outcome(save)

    async def outcome(self, save: Save) -> SavedSlot:
        """Waits for a save that the engine knows; giving up stops it.

        Raises:
            EngineError: It failed.
        """
        return await asyncio.wrap_future(save.done)

    async def restore(self, restore: Restore, model: LoadedModel) -> RestoredSlot:
        """Restores a slot once no request uses it; giving up leaves it as it is.

        Raises:
            EngineError: As `Engine.transfer_slot`.
        """
        model.engine.transfer_slot(restore)
        return await asyncio.wrap_future(restore.done)

    def close(self) -> None:
        """Takes no more work; calls that wait for a model are refused."""
        self._is_stopping = True
        self._has_changed.set()

    async def stop(self, grace_s: float, *, save_s: float = 0.0) -> None:
        """Takes no more work, lets what runs go on for `grace_s`, then ends the engine threads.

        Requests end `save_s` earlier, for the saves that were asked for. May be called again with
        less time, while the first call still waits.
        """
        self.close()
        engines = [tenure.model.engine for tenure in self._books.tenures]
        # At once, on this thread: no request may begin while a worker for the wait is awaited.
        for engine in engines:
            engine.begin_stop(grace_s, save_s=save_s)
        await asyncio.gather(*(asyncio.to_thread(engine.join) for engine in engines))

    @property
    def _current(self) -> Tenure:
        if self._is_stopping:
            raise ShuttingDown
        if self._served is None:
            raise ModelLoading
        return self._served

    async def _settled(self, size: int) -> None:
        """Waits until the model is not being changed."""
        if not self._is_suspended:
            return
        with self._room.place(size):
            while self._is_suspended and not self._is_stopping:
                await self._has_changed.wait()

    def _show(self, tenure: Tenure) -> None:
        self._served, self._is_suspended = tenure, False
        self._shown = Served(self._shown.number + 1, tenure.model.names.model_id)
        self._wake()

    def _wake(self) -> None:
        # Who waits has this one; who comes waits for the next.
        self._has_changed.set()
        self._has_changed = asyncio.Event()

    def _submit(
        self, engine: Engine, stream: _Stream, sample: int, request: Request, save: Save | None
    ) -> None:
        request_id = request.request_id
        if request_id in self._streams:
            raise DuplicateRequest(request_id)
        self._streams[request_id] = (stream, sample)
        stream.running.add(request_id)
        try:
            engine.submit(request, save=save)
        except EngineError:
            self._forget(request_id)
            raise

    def _sink(self, events: Sequence[tuple[str, Event]]) -> None:
        """Hands one step's events to the event loop; the engine thread's only way in."""
        self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[tuple[str, Event]]) -> None:
        for request_id, event in events:
            self._count(event)
            stream, sample = self._streams[request_id]
            if not stream.is_closed:
                stream.queue.put_nowait((sample, event))
            if isinstance(event, Finished | Embedded | Failed | Cancelled):
                self._forget(request_id)
        self._look_for_faults()

    def _look_for_faults(self) -> None:
        """Tells once of each engine that has died, if it is the one that serves."""
        for tenure in self._books.tenures:
            fault = tenure.model.engine.fault
            if fault is not None and tenure is self._served and tenure not in self._dead:
                self._dead.add(tenure)
                self._hooks.on_fault(fault)

    def _count(self, event: Event) -> None:
        match event:
            case Cancelled(cause=cause):
                self._hooks.on_cancelled(cause)
            case Failed(error=DeadlineExceeded()):
                self._hooks.on_cancelled(CancelCause.DEADLINE)
            case _:
                return

    def _forget(self, request_id: str) -> None:
        stream, _ = self._streams.pop(request_id)
        stream.running.discard(request_id)


def _raise_if_over(event: Event) -> None:
    match event:
        case Failed(error=error):
            raise error
        case Cancelled():
            # A client's own cancel closes its stream first, so this is the server's end.
            raise ShuttingDown
        case _:
            return


async def _on_own_thread(build: Callable[[], LoadedModel]) -> LoadedModel:
    """Runs a long call on a thread that nobody joins: a stop during a load must not wait for it."""
    done: Future[LoadedModel] = Future()
    # A running future cannot be cancelled from here, so the thread can always leave its result.
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(build())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return await asyncio.wrap_future(done)
