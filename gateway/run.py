"""The Generate calls behind one HTTP body, merged into one sequence of events.

Each job is its own call; the events of one job keep their order, those of several interleave as
they come. Leaving the run cancels every call, whatever state it is in. This module knows no
dialect.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import grpc.aio
from kvarts.v1 import generation_pb2

from gateway.errors import ApiError, server_fault
from gateway.off_loop import off_loop
from gateway.requests import Job
from gateway.rpc_errors import from_rpc
from gateway.service import Metadata, Service
from gateway.timings import Timings, microseconds

_LOG = logging.getLogger(__name__)

# Events that wait for a slow client per body; beyond it the calls themselves are held up.
_QUEUE_EVENTS = 32

CallGroup = generation_pb2.CallGroup
Event = (
    generation_pb2.Started
    | generation_pb2.Progress
    | generation_pb2.Chunk
    | generation_pb2.Finished
)


@dataclass
class Sample:
    """What has come of one job so far."""

    job: Job
    started: generation_pb2.Started = field(default_factory=generation_pb2.Started)
    chunks: list[generation_pb2.Chunk] = field(default_factory=list[generation_pb2.Chunk])
    finished: generation_pb2.Finished | None = None
    prompt_us: int = 0
    started_at_s: float = 0.0

    def take(self, event: Event, *, keep_chunks: bool) -> None:
        """Records an event. Chunks are only kept for an answer in one piece."""
        match event:
            case generation_pb2.Started():
                self.started = event
                self.started_at_s = time.monotonic()
            case generation_pb2.Progress():
                self.prompt_us = microseconds(event.elapsed)
            case generation_pb2.Chunk():
                if event.completion_tokens == 1:
                    self.prompt_us = self._elapsed_us() - microseconds(event.decode_elapsed)
                if keep_chunks:
                    self.chunks.append(event)
            case generation_pb2.Finished():
                self.finished = event

    def timings_at(self, event: generation_pb2.Chunk | generation_pb2.Progress) -> Timings:
        """The timings in the middle of a stream; the prompt's time is this side's measure."""
        cached = self.started.cached_tokens
        if isinstance(event, generation_pb2.Progress):
            evaluated = event.processed_tokens - event.cached_tokens
            # The first tells what was there already, for which no time has passed.
            return Timings(cached, evaluated, self.prompt_us if evaluated else 0, 0, 0)
        return Timings(
            cached=cached,
            evaluated=self.started.prompt_tokens - cached,
            prompt_us=max(0, self.prompt_us),
            predicted=event.completion_tokens,
            predict_us=microseconds(event.decode_elapsed),
        )

    def _elapsed_us(self) -> int:
        return round((time.monotonic() - self.started_at_s) * 1e6)


def timings_of(finished: generation_pb2.Finished) -> Timings:
    """The timings of a complete sample."""
    return Timings(
        cached=finished.cached_tokens,
        evaluated=finished.prompt_tokens - finished.cached_tokens,
        prompt_us=microseconds(finished.prefill_duration),
        predicted=finished.completion_tokens,
        predict_us=microseconds(finished.decode_duration),
    )


class Run:
    """All jobs of a body. Use as an async context; `num_slots` jobs at most run at a time."""

    def __init__(
        self,
        service: Service,
        jobs: Sequence[Job],
        metadata: Metadata,
        num_slots: int,
        *,
        weight: int = 0,
    ) -> None:
        """`weight` is about what a job's message has of the body; see `off_loop`."""
        self._service = service
        self._metadata = metadata
        self._samples = [Sample(job) for job in jobs]
        self._num_calls = max(1, num_slots)
        self._weight = weight
        # Room for one event of each call, so that emptying it once lets all of them go on.
        room = max(_QUEUE_EVENTS, self._num_calls)
        self._queue = asyncio.Queue[tuple[Sample, Event | ApiError]](room)
        self._tasks: list[asyncio.Task[None]] = []
        self._calls = set[grpc.aio.Call]()
        self._is_left = False

    async def __aenter__(self) -> Run:
        """Starts the first jobs; each that ends makes room for the next."""
        waiting = iter(self._samples)
        num_tasks = min(self._num_calls, len(self._samples))
        groups = [None] if num_tasks == 1 else _group_of(num_tasks)
        self._tasks = [asyncio.create_task(self._read_all(waiting, group)) for group in groups]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancels what still runs and waits until it is gone.

        The calls are cancelled, not the tasks that read them: gRPC loses the memory of a read whose
        task is cancelled, some 0.5 KB for every client that goes away.
        """
        self._is_left = True
        for call in self._calls:
            call.cancel()
        while not self._queue.empty():
            self._queue.get_nowait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def events(
        self, *, keep_chunks: bool = False
    ) -> AsyncGenerator[tuple[Sample, Event], None]:
        """Yields events in order of arrival until every sample has finished.

        Raises:
            ApiError: a call was refused or broke; the other samples are of no use then.
        """
        remaining = len(self._samples)
        while remaining:
            sample, event = await self._queue.get()
            if isinstance(event, ApiError):
                raise event
            sample.take(event, keep_chunks=keep_chunks)
            remaining -= isinstance(event, generation_pb2.Finished)
            yield sample, event

    async def collect(self) -> list[Sample]:
        """Waits for all samples; they come back in the order of their jobs.

        Raises:
            ApiError: a call was refused or broke.
        """
        async for _ in self.events(keep_chunks=True):
            pass
        return self._samples

    async def _read_all(self, waiting: Iterator[Sample], group: CallGroup | None) -> None:
        """Runs one job after the other; the first is of a group with those of the other tasks."""
        for sample in waiting:
            if self._is_left:
                return
            await self._read(sample, group)
            group = None

    async def _read(self, sample: Sample, group: CallGroup | None) -> None:
        try:
            await self._forward(sample, group)
        except grpc.aio.AioRpcError as error:
            await self._queue.put((sample, from_rpc(error)))
        except asyncio.CancelledError:
            # A call that either side cancelled raises this too; the service's must not go unseen.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if not self._is_left:
                await self._queue.put((sample, server_fault("the service cancelled the call")))
        except Exception:
            # A bug: who waits for events must not wait for ever.
            _LOG.exception("a call's events could not be read")
            await self._queue.put((sample, server_fault("internal error")))

    async def _forward(self, sample: Sample, group: CallGroup | None) -> None:
        request = await off_loop(sample.job.message, weight=self._weight)
        if group is not None:
            request.group.CopyFrom(group)
        if self._is_left:
            return
        call = self._service.generation.Generate(request, metadata=self._metadata)
        self._calls.add(call)
        try:
            async for response in call:
                event = _event(response)
                if event is None:
                    continue
                await self._queue.put((sample, event))
                if self._is_left or isinstance(event, generation_pb2.Finished):
                    return
        finally:
            self._calls.discard(call)
            call.cancel()
        await self._queue.put((sample, server_fault("the service ended the stream too early")))


def _group_of(num_calls: int) -> list[CallGroup]:
    """What each of the first calls says of the others: the peer queues all of a body at once."""
    name = uuid.uuid4().hex
    return [CallGroup(id=name, num_calls=num_calls, index=index) for index in range(num_calls)]


def _event(response: generation_pb2.GenerateResponse) -> Event | None:
    """The event of a response; None for one that this version does not know."""
    match response.WhichOneof("event"):
        case "started":
            return response.started
        case "chunk":
            return response.chunk
        case "finished":
            return response.finished
        case "progress":
            return response.progress
        case _:
            return None
