"""What a gateway says while it cannot become ready, and how often."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway import readiness as readiness_module
from gateway.facts import Facts, gather
from gateway.options import GatewayOptions
from gateway.readiness import Readiness
from gateway.service import connect
from tests.unit.gateway.fake_service import FakeService, failing
from tests.waiting import until_so

# More tries than a gateway makes in the time that one warning is said to last.
NUM_TRIES = 4


class Clock:
    """Seconds that pass when the test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def watching(
    service: FakeService, *, key: str | None = None, clock: Clock | None = None
) -> AsyncGenerator[Readiness]:
    options = GatewayOptions(service=await service.start(), service_key=key)
    connected = connect(options)
    readiness = Readiness(connected, options, clock or Clock())
    task = asyncio.create_task(readiness.watch())
    try:
        async with asyncio.timeout(30):
            yield readiness
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connected.channel.close()


async def tried(service: FakeService, name: str) -> None:
    """Waits until a call has come so often that all but its last try have been dealt with."""
    for _ in range(NUM_TRIES):
        while await service.model_calls.get() != name:
            pass


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_key_that_does_not_fit_is_told_once(
    service: FakeService, caplog: pytest.LogCaptureFixture, key: str | None
):
    service.required_key = "right"
    async with watching(service, key=key) as readiness:
        await tried(service, "GetModel")
        assert readiness.facts is None
    assert warnings(caplog) == [
        "not ready: ModelService/GetModel answers UNAUTHENTICATED: no such key; "
        "--service-key must be a key of the service"
    ]


async def test_a_failing_call_is_told_once_and_again_where_it_lasts(
    service: FakeService, caplog: pytest.LogCaptureFixture
):
    clock = Clock()
    service.refusals["GetServerInfo"] = failing(grpc.StatusCode.INTERNAL, "INTERNAL", "broken")
    told = "not ready: ModelService/GetServerInfo answers INTERNAL: broken"
    async with watching(service, clock=clock):
        await tried(service, "GetServerInfo")
        assert warnings(caplog) == [told]
        clock.now_s += 59
        await tried(service, "GetServerInfo")
        assert warnings(caplog) == [told]
        clock.now_s += 1
        await tried(service, "GetServerInfo")
        assert warnings(caplog) == [told] * 2


async def test_another_cause_is_told_at_once_and_readiness_comes(
    service: FakeService, caplog: pytest.LogCaptureFixture
):
    service.refusals["GetModel"] = failing(grpc.StatusCode.INTERNAL, "INTERNAL", "broken")
    async with watching(service) as readiness:
        await tried(service, "GetModel")
        service.refusals["GetModel"] = failing(grpc.StatusCode.UNIMPLEMENTED, "", "no such call")
        await tried(service, "GetModel")
        assert [line.split(" answers ")[1] for line in warnings(caplog)] == [
            "INTERNAL: broken",
            "UNIMPLEMENTED: no such call",
        ]
        service.refusals.clear()
        while await service.model_calls.get() != "GetServerInfo":
            pass
        await until_so(lambda: readiness.facts is not None)


async def test_a_service_that_is_away_is_nothing_to_warn_of(
    service: FakeService, caplog: pytest.LogCaptureFixture
):
    away = failing(grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING", "loads")
    service.refusals["GetModel"] = away
    async with watching(service):
        await tried(service, "GetModel")
    assert warnings(caplog) == []


def step_by(clock: Clock, enough: asyncio.Event) -> Callable[[float], Awaitable[None]]:
    """A pause that passes at once by the clock, until it has passed often enough."""

    async def pause(seconds: float) -> None:
        if clock.now_s >= 1130:
            enough.set()
            await asyncio.Event().wait()
        clock.now_s += seconds
        await asyncio.sleep(0)

    return pause


class _At(logging.Handler):
    """Notes when a line was logged."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(logging.WARNING)
        self.clock = clock
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((self.clock.now_s - Clock.now_s, record.getMessage()))


async def test_a_service_without_a_connection_is_told_after_5_s_and_once_a_minute():
    clock, enough = Clock(), asyncio.Event()
    # Bound and not listening: a connection is refused, and nobody else gets the port.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        options = GatewayOptions(service=address)
        connected = connect(options)
        readiness = Readiness(connected, options, clock, step_by(clock, enough))
        noted = _At(clock)
        logger = logging.getLogger("gateway.readiness")
        logger.addHandler(noted)
        task = asyncio.create_task(readiness.watch())
        try:
            async with asyncio.timeout(30):
                await enough.wait()
        finally:
            logger.removeHandler(noted)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await connected.channel.close()
    told = f"still waiting for the service at {address}"
    assert noted.lines == [(5, told), (65, told), (125, told)]


async def test_an_unexpected_fault_is_told_once_and_does_not_end_the_watch(
    service: FakeService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    is_broken = True

    def gather_or_fail(*told: Any) -> Facts:
        if is_broken:
            raise KeyError("a fact that is not there")
        return gather(*told)

    monkeypatch.setattr(readiness_module, "gather", gather_or_fail)
    async with watching(service) as readiness:
        await tried(service, "GetServerInfo")
        assert readiness.facts is None
        assert warnings(caplog) == ["not ready: an unexpected fault; trying again"]
        assert "a fact that is not there" in caplog.text
        is_broken = False
        await until_so(lambda: readiness.facts is not None)
