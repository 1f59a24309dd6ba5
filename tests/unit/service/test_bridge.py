from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from engine.engine import Engine
from engine.errors import (
    ContextOverflow,
    DeadlineExceeded,
    DuplicateRequest,
    ModelLoading,
    ShuttingDown,
)
from engine.requests import Request
from engine.types import CancelCause, Chunk, EventSink, Finished, Started
from service.bridge import Bridge, BridgeHooks
from service.loaded import LoadedModel
from service.waiting_room import WaitingRoom
from tests.contract.serving import StepGate, fake_model, gated_runner
from tests.fake_runner import FakeRunner
from tests.fakes import FakeClock, fake_engine


@dataclass
class Setup:
    """A bridge with a model, and what it told its hooks."""

    bridge: Bridge
    engine: Engine
    causes: list[CancelCause] = field(default_factory=list[CancelCause])
    faults: list[BaseException] = field(default_factory=list[BaseException])


async def ready(runner: FakeRunner | None = None, clock: FakeClock | None = None) -> Setup:
    causes: list[CancelCause] = []
    faults: list[BaseException] = []
    bridge = Bridge(
        BridgeHooks(causes.append, faults.append), WaitingRoom(max_calls=8, max_bytes=8)
    )
    model = await bridge.load(
        lambda sink: fake_model(fake_engine(sink, runner=runner, clock=clock))
    )
    return Setup(bridge, model.engine, causes, faults)


def request(name: str, **changes: int) -> Request:
    return Request(name, (0, 5, 6), max_tokens=changes.get("max_tokens", 3))


async def run(bridge: Bridge, *requests: Request) -> list[tuple[int, type]]:
    return [(sample, type(event)) async for sample, event in bridge.events(requests)]


async def test_one_request_is_started_sampled_and_finished() -> None:
    it = await ready()
    seen = await run(it.bridge, request("a"))
    assert seen == [(0, Started), (0, Chunk), (0, Chunk), (0, Chunk), (0, Finished)]
    await it.bridge.stop(1)


async def test_samples_share_one_stream() -> None:
    it = await ready()
    seen = await run(it.bridge, request("a"), request("b"))
    assert [kind for sample, kind in seen if sample == 0] == [Started, *[Chunk] * 3, Finished]
    assert [kind for sample, kind in seen if sample == 1] == [Started, *[Chunk] * 3, Finished]
    await it.bridge.stop(1)


async def test_before_the_model_is_there() -> None:
    bridge = Bridge(
        BridgeHooks(lambda _: None, lambda _: None), WaitingRoom(max_calls=8, max_bytes=8)
    )
    assert bridge.snapshot() is None
    with pytest.raises(ModelLoading):
        _ = bridge.model
    await bridge.stop(0)
    with pytest.raises(ShuttingDown):
        _ = bridge.model


async def test_a_refused_request_leaves_its_id_free() -> None:
    it = await ready()
    with pytest.raises(ContextOverflow):
        await run(it.bridge, Request("a", (5,) * 300))
    assert await run(it.bridge, request("a"))
    await it.bridge.stop(1)


async def test_what_is_on_its_way_never_reaches_a_later_request_of_the_same_id() -> None:
    gate = StepGate()
    it = await ready(gated_runner(gate))
    async with aclosing(it.bridge.events([request("a", max_tokens=100)])) as events:
        pending = asyncio.ensure_future(anext(events))
        await gate.arrival()
        gate.step()
        await pending
        await gate.arrival()
    # The engine is inside a step and still knows the first one.
    with pytest.raises(DuplicateRequest):
        await run(it.bridge, request("a"))
    gate.open()
    # Behind the cancel in the engine's queue: when this one is done, so is that.
    assert await run(it.bridge, request("b"))
    assert it.causes == [CancelCause.CLIENT]
    seen = await run(it.bridge, request("a"))
    assert seen[0] == (0, Started)
    assert len(seen) == 5
    await it.bridge.stop(1)


async def test_an_expired_request_is_counted_and_raises() -> None:
    gate, clock = StepGate(), FakeClock()
    it = await ready(gated_runner(gate), clock)
    late = Request("a", (0, 5), max_tokens=50, deadline_s=clock.now_s + 5)
    running = asyncio.ensure_future(run(it.bridge, late))
    await gate.arrival()
    clock.advance(6)
    gate.open()
    with pytest.raises(DeadlineExceeded):
        await running
    assert it.causes == [CancelCause.DEADLINE]
    await it.bridge.stop(1)


async def test_a_stop_ends_what_runs() -> None:
    gate = StepGate()
    it = await ready(gated_runner(gate))
    running = asyncio.ensure_future(run(it.bridge, request("a", max_tokens=200)))
    await gate.arrival()
    stopping = asyncio.ensure_future(it.bridge.stop(0))
    gate.open()
    with pytest.raises(ShuttingDown):
        await running
    await stopping
    assert it.causes == [CancelCause.SHUTDOWN]


async def test_a_stop_during_a_load_throws_the_model_away() -> None:
    go = threading.Event()
    engines: list[Engine] = []

    def load(sink: EventSink) -> LoadedModel:
        assert go.wait(30)
        engines.append(fake_engine(sink))
        return fake_model(engines[0])

    bridge = Bridge(
        BridgeHooks(lambda _: None, lambda _: None), WaitingRoom(max_calls=8, max_bytes=8)
    )
    loading = asyncio.ensure_future(bridge.load(load))
    # Lets the task begin.
    await asyncio.sleep(0)
    await bridge.stop(0)
    go.set()
    with pytest.raises(ShuttingDown):
        await loading
    # Starting it now is the proof that nobody had.
    engines[0].start()
    engines[0].stop()


async def test_a_load_that_fails_leaves_the_bridge_loading() -> None:
    def load(sink: EventSink) -> LoadedModel:
        raise OSError("gone")

    bridge = Bridge(
        BridgeHooks(lambda _: None, lambda _: None), WaitingRoom(max_calls=8, max_bytes=8)
    )
    with pytest.raises(OSError, match="gone"):
        await bridge.load(load)
    with pytest.raises(ModelLoading):
        _ = bridge.model


async def test_the_death_of_the_engine_is_told_once() -> None:
    gate, clock = StepGate(), _Clock()
    it = await ready(gated_runner(gate), clock)
    calls = [
        asyncio.ensure_future(run(it.bridge, request(name, max_tokens=99))) for name in ("a", "b")
    ]
    await gate.arrival()
    clock.is_broken = True
    gate.open()
    assert all(
        isinstance(end, Exception) for end in await asyncio.gather(*calls, return_exceptions=True)
    )
    clock.is_broken = False
    assert [type(fault) for fault in it.faults] == [ValueError]
    await it.bridge.stop(1)


class _Clock(FakeClock):
    is_broken = False

    def __call__(self) -> float:
        if self.is_broken:
            raise ValueError("a bug")
        return super().__call__()
