"""How a call counts whose client goes away; what a live call shows is in the contract tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
from kvarts.v1 import generation_pb2

from service import generation
from service.bridge import Bridge, BridgeHooks
from service.call_groups import CallGroups
from service.generation import GenerationServicer
from service.idle_slots import IdleSlotLog
from service.interceptors import Fence, Telemetry
from service.metrics import Metrics
from service.waiting_room import WaitingRoom
from tests.contract.serving import GenerateRequest, GenerateResponse, fake_model
from tests.fakes import fake_engine

METHOD = "/kvarts.v1.GenerationService/Generate"


@dataclass
class Wire:
    """A context whose client takes everything until an event of one kind, and then nothing."""

    stuck_at: str
    remaining_s: float | None = None
    is_stuck: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, message: GenerateResponse) -> None:
        if message.WhichOneof("event") == self.stuck_at:
            self.is_stuck.set()
            await asyncio.Event().wait()

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    def time_remaining(self) -> float | None:
        return self.remaining_s

    def code(self) -> int:
        return 0


@dataclass(frozen=True)
class Details:
    method: str = METHOD
    invocation_metadata: tuple[tuple[str, str], ...] = ()


@pytest.fixture
async def bridge() -> AsyncIterator[Bridge]:
    bridge = Bridge(
        BridgeHooks(lambda _: None, lambda _: None), WaitingRoom(max_calls=8, max_bytes=8)
    )
    await bridge.load(lambda sink: fake_model(fake_engine(sink)))
    yield bridge
    await bridge.stop(1)


async def served(bridge: Bridge, metrics: Metrics) -> Any:
    """The handler of Generate as the server calls it."""
    inner = grpc.unary_stream_rpc_method_handler(
        GenerationServicer(
            bridge,
            metrics,
            IdleSlotLog(is_on=False),
            CallGroups(WaitingRoom(max_calls=8, max_bytes=8)),
        ).Generate,
        generation_pb2.GenerateRequest.FromString,
        generation_pb2.GenerateResponse.SerializeToString,
    )

    async def servicer(_: object) -> Any:
        return inner

    async def fenced(details: Any) -> Any:
        return await Fence(30).intercept_service(servicer, details)

    handler: Any = await Telemetry(metrics).intercept_service(fenced, cast("Any", Details()))
    return handler.unary_stream


class Answered(Wire):
    """A context that keeps the status that a call was ended with."""

    status: grpc.Status | None = None

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status


async def test_what_a_call_waits_for_may_be_cancelled_and_the_call_is_not(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would take it for the call's own end, and never answer."""

    async def cancelled(*given: object) -> Any:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    monkeypatch.setattr(generation, "_read", cancelled)
    generate, context = await served(bridge, Metrics()), Answered("nothing")
    await generate(GenerateRequest(text="abc").SerializeToString(), context)
    assert context.status is not None
    assert context.status.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("wire", "num_samples", "code"),
    [
        (Wire("started"), 1, "CANCELLED"),
        (Wire("chunk"), 1, "CANCELLED"),
        # It may be gone before the server hears that the last message has left.
        (Wire("finished"), 1, "OK"),
        (Wire("finished"), 2, "CANCELLED"),
        (Wire("chunk", remaining_s=0.01), 1, "DEADLINE_EXCEEDED"),
        (Wire("chunk", remaining_s=100.0), 1, "CANCELLED"),
        (Wire("finished", remaining_s=100.0), 1, "OK"),
    ],
)
async def test_a_client_that_goes_away(
    bridge: Bridge, wire: Wire, num_samples: int, code: str
) -> None:
    metrics = Metrics()
    generate = await served(bridge, metrics)
    request = GenerateRequest(text="abc", max_tokens=2, num_samples=num_samples)
    call = asyncio.create_task(generate(request.SerializeToString(), wire))
    async with asyncio.timeout(30):
        await wire.is_stuck.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    labels = {"rpc": "GenerationService/Generate", "code": code}
    assert metrics.registry.get_sample_value("kvarts_requests_total", labels) == 1
