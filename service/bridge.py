"""Between the event loop and the engine thread: requests go down, events come up.

One `call_soon_threadsafe` per engine step carries all of the step's events; each call has one
queue, and the engine never waits for it. Everything here but `_sink` runs on the event loop. It
must not know a message or a status.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    ModelLoading,
    ShuttingDown,
)
from engine.scheduling.erasing import ErasedSlot
from engine.scheduling.wishes import Restore, RestoredSlot, Save, SavedSlot
from engine.types import (
    CancelCause,
    Cancelled,
    Embedded,
    Event,
    Failed,
    Finished,
    Request,
    Snapshot,
)
from service.loaded import LoadedModel, LoadModel


@dataclass(frozen=True)
class BridgeHooks:
    """Who is told what: the cause of every cancellation, and the death of the engine thread."""

    on_cancelled: Callable[[CancelCause], None]
    on_fault: Callable[[BaseException], None]


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


class Bridge:
    """Owns the engine from load to stop, and routes events to the calls that wait for them."""

    def __init__(self, hooks: BridgeHooks) -> None:
        """Must be called on the event loop that serves."""
        self._hooks = hooks
        self._loop = asyncio.get_running_loop()
        self._model: LoadedModel | None = None
        self._is_stopping = False
        self._is_dead = False
        # By request id, until the engine's last event: a call that has gone away keeps its entry,
        # so that what is still on its way cannot reach a later request of the same id.
        self._streams: dict[str, tuple[_Stream, int]] = {}

    async def load(self, load_model: LoadModel) -> LoadedModel:
        """Builds the model on a thread, then starts its engine.

        Raises:
            ShuttingDown: The server was stopped meanwhile.
            Exception: Whatever the loader raises; the bridge stays without a model.
        """
        model = await _on_own_thread(lambda: load_model(self._sink))
        if self._is_stopping:
            raise ShuttingDown
        model.engine.start()
        self._model = model
        return model

    @property
    def model(self) -> LoadedModel:
        """The model that is served.

        Raises:
            ModelLoading: There is none yet.
            ShuttingDown: The server stops.
        """
        if self._is_stopping:
            raise ShuttingDown
        if self._model is None:
            raise ModelLoading
        return self._model

    @property
    def engine(self) -> Engine:
        """The model's engine; raises as `model` does."""
        return self.model.engine

    def snapshot(self) -> Snapshot | None:
        """Returns what the last step published, None while there is no model."""
        return self._model.engine.snapshot() if self._model else None

    async def events(
        self,
        requests: Sequence[Request],
        cause: Callable[[], CancelCause] = lambda: CancelCause.CLIENT,
        *,
        save: Save | None = None,
    ) -> AsyncGenerator[tuple[int, Event]]:
        """Runs the samples of one call and yields (sample, event) until each has finished.

        With `save` the only one is a prompt that is computed to be saved.

        Closing the generator, for whatever reason, cancels what still runs; `cause` is then asked
        for the reason.

        Raises:
            EngineError: A sample was refused, failed, expired or was cancelled; the others then
                are cancelled too.
        """
        engine = self.engine
        stream = _Stream()
        num_left = len(requests)
        try:
            for sample, request in enumerate(requests):
                self._submit(engine, stream, sample, request, save)
            while num_left:
                sample, event = await stream.queue.get()
                _raise_if_over(event)
                yield sample, event
                num_left -= isinstance(event, Finished | Embedded)
        finally:
            stream.is_closed = True
            for request_id in stream.running:
                engine.cancel(request_id, cause())

    async def awake(self) -> LoadedModel:
        """Returns the model once its pools do not sleep: for calls that count as use.

        Raises:
            EngineError: It is not there yet, or as `Engine.awake`.
        """
        model = self.model
        if model.engine.snapshot().is_asleep:
            await asyncio.wrap_future(model.engine.awake())
        return model

    async def erase(self, slot_id: int, *, fail_if_busy: bool, tenant: str | None) -> ErasedSlot:
        """Empties a slot once no request uses it; giving up the wait leaves it as it is.

        Raises:
            EngineError: As `Engine.erase_slot` and its future.
        """
        done = self.engine.erase_slot(slot_id, fail_if_busy=fail_if_busy, tenant=tenant)
        return await asyncio.wrap_future(done)

    async def save(self, save: Save) -> SavedSlot:
        """Saves a slot once no request uses it; giving up leaves the file as it was.

        Raises:
            EngineError: As `Engine.transfer_slot`.
        """
        self.engine.transfer_slot(save)
        return await self.outcome(save)

    async def outcome(self, save: Save) -> SavedSlot:
        """Waits for a save that the engine knows; giving up stops it.

        Raises:
            EngineError: It failed.
        """
        return await asyncio.wrap_future(save.done)

    async def restore(self, restore: Restore) -> RestoredSlot:
        """Restores a slot once no request uses it; giving up leaves it as it is.

        Raises:
            EngineError: As `Engine.transfer_slot`.
        """
        self.engine.transfer_slot(restore)
        return await asyncio.wrap_future(restore.done)

    async def stop(self, grace_s: float, *, save_s: float = 0.0) -> None:
        """Takes no more work, lets what runs go on for `grace_s`, then ends the engine thread.

        Requests end `save_s` earlier, for the saves that were asked for. May be called again with less time, while the first call still waits.
        """
        self._is_stopping = True
        if self._model is not None:
            await asyncio.to_thread(self._model.engine.stop, grace_s, save_s=save_s)

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
        fault = self._model.engine.fault if self._model else None
        if fault is not None and not self._is_dead:
            self._is_dead = True
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
