"""What a gateway says while it cannot become ready, and how often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import pytest

from gateway.options import GatewayOptions
from gateway.readiness import Readiness
from gateway.service import connect
from tests.unit.gateway.fake_service import FakeService, failing

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
        # There is nothing to wait on but the answer itself.
        while readiness.facts is None:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_service_that_is_away_is_nothing_to_warn_of(
    service: FakeService, caplog: pytest.LogCaptureFixture
):
    away = failing(grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING", "loads")
    service.refusals["GetModel"] = away
    async with watching(service):
        await tried(service, "GetModel")
    assert warnings(caplog) == []
