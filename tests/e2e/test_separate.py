"""kvarts-service and kvarts-gateway as two programs: keys, metrics, and one without the other."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from kvarts.v1 import generation_pb2, slot_pb2

from tests.e2e.conftest import healthy, http_client
from tests.e2e.programs import Program, running
from tests.e2e.rpc import client

pytestmark = pytest.mark.slow

USER, ADMIN = "a-user", "the-admin"
BODY: dict[str, Any] = {"prompt": "the day", "n_predict": 4, "temperature": 0}


@dataclass(frozen=True)
class Pair:
    """A service with keys, and a gateway that knows its address and a key for its own calls."""

    service: Program
    gateway: Program
    service_flags: tuple[str, ...]
    metrics_url: str

    @property
    def url(self) -> str:
        return self.gateway.http_url()


@pytest.fixture(scope="module")
async def pair(layout: tuple[str, ...]) -> AsyncGenerator[Pair]:
    flags = (*layout, "--api-key", USER, "--admin-key", ADMIN)
    extra = ("--grpc-port", "0", "--metrics-port", "0")
    with running("kvarts-service", *flags, *extra) as service:
        address = service.grpc_address()
        gateway_flags = ("--service", address, "--service-key", USER, "--port", "0")
        with running("kvarts-gateway", *gateway_flags) as gateway:
            service.ready()
            await healthy(gateway.http_url())
            yield Pair(service, gateway, flags, service.metrics_url())


async def test_a_gateway_needs_only_an_address(layout: tuple[str, ...]) -> None:
    with running("kvarts-service", *layout, "--grpc-port", "0") as service:
        flags = ("--service", service.grpc_address(), "--port", "0")
        with running("kvarts-gateway", *flags) as gateway:
            await healthy(gateway.http_url())
            async with http_client(gateway.http_url()) as http:
                assert (await http.post("/completion", json=BODY)).json()["content"]


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("wrong", 401), (USER, 200), (ADMIN, 200)]
)
async def test_the_client_s_key_decides(pair: Pair, key: str | None, status: int) -> None:
    async with http_client(pair.url, key) as http:
        reply = await http.post("/completion", json=BODY)
    assert reply.status_code == status
    if status == 401:
        assert reply.json()["error"]["message"] == "Invalid API Key"
        assert reply.headers["x-kvarts-reason"] == "BAD_API_KEY"


async def test_health_needs_no_key(pair: Pair) -> None:
    async with http_client(pair.url) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}


@pytest.mark.parametrize(("key", "status"), [(USER, 403), (ADMIN, 200)])
async def test_only_the_admin_erases_a_slot(pair: Pair, key: str, status: int) -> None:
    request = slot_pb2.EraseSlotRequest(slot_id=0)
    async with client(pair.service.grpc_address(), key) as rpc:
        erasing = rpc.slots.EraseSlot(request, metadata=rpc.metadata)
        if status == 200:
            assert (await erasing).slot_id == 0
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await erasing
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_public_door_is_the_same_service(pair: Pair) -> None:
    request = generation_pb2.GenerateRequest(text="the day", max_tokens=4)
    request.sampling.temperature = 0
    text = ""
    async with client(pair.service.grpc_address(), USER) as rpc:
        async for response in rpc.generation.Generate(request, metadata=rpc.metadata):
            text += response.chunk.text
    async with http_client(pair.url, USER) as http:
        assert (await http.post("/completion", json=BODY)).json()["content"] == text != ""


async def test_metrics_come_without_gateway_and_key(pair: Pair) -> None:
    async with http_client(pair.metrics_url) as http:
        before = _values(await http.get("/metrics"))
        async with http_client(pair.url, USER) as gateway:
            assert (await gateway.post("/completion", json=BODY)).status_code == 200
        after = _values(await http.get("/metrics"))
    assert after["kvarts_generated_tokens_total"] - before["kvarts_generated_tokens_total"] == 4
    assert after["kvarts_compiles_total"] == before["kvarts_compiles_total"]
    assert after["kvarts_requests_running"] == after["kvarts_requests_queued"] == 0
    assert after['kvarts_pool_units{pool="kv",state="used"}'] == 0


def _values(reply: httpx.Response) -> dict[str, float]:
    assert reply.status_code == 200
    pairs = (line.rsplit(" ", 1) for line in reply.text.splitlines() if line[0] != "#")
    return {name: float(value) for name, value in pairs}


async def test_either_ends_and_comes_back_without_the_other(pair: Pair) -> None:
    # Last of this file: it ends both programs of the pair.
    address = pair.service.grpc_address()
    pair.service.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(pair.service.exit_status) == 0
    await healthy(pair.url, status=503)
    async with http_client(pair.url, USER) as http:
        assert (await http.post("/completion", json=BODY)).status_code == 503

    port = ("--grpc-port", address.rpartition(":")[2])
    with running("kvarts-service", *pair.service_flags, *port) as again:
        await healthy(pair.url)
        async with http_client(pair.url, USER) as http:
            assert (await http.post("/completion", json=BODY)).status_code == 200
        pair.gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(pair.gateway.exit_status) == 0
        async with client(address, USER) as rpc:
            assert (await rpc.info()).gauges.running_requests == 0
        assert again.process.poll() is None
        assert not re.search("Traceback", pair.gateway.output.text() + again.output.text())
