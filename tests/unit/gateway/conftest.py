"""A gateway on a free port in front of a fake service, both in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import httpx
import pytest
import uvicorn

from gateway.app import make_app
from gateway.keys import Keys
from gateway.options import GatewayOptions
from gateway.protocol import http_protocol
from gateway.reload import Reloads
from gateway.service import connect
from gateway.tracing import PASSED_ON, Spans
from tests.unit.gateway.fake_service import FakeService
from tests.waiting import until

Serve = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self):
        yield


@contextlib.asynccontextmanager
async def serving(
    address: str,
    *,
    waits: bool = True,
    spans: Spans = PASSED_ON,
    keys: Keys | None = None,
    reloads: Reloads | None = None,
    send_buffer_bytes: int | None = None,
    **options: object,
) -> AsyncGenerator[httpx.AsyncClient]:
    """A gateway on a free port in front of the service at `address`.

    `send_buffer_bytes` is how much the system takes of an answer that nobody reads; by itself it
    takes some megabytes.
    """
    told = GatewayOptions(service=address, **options)  # pyright: ignore[reportArgumentType] # tests name options freely
    service = connect(told)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    config = uvicorn.Config(
        make_app(told, service, keys=keys, reloads=reloads, spans=spans),
        http=http_protocol(told.timeout_s),
        loop="asyncio",
        ws="none",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            if waits:
                await until_ready(client, told.api_prefix)
            yield client
    finally:
        server.should_exit = True
        await running
        await service.channel.close()


async def until_ready(client: httpx.AsyncClient, prefix: str = "", status: int = 200) -> None:
    """Waits until health answers with the status."""
    headers = {"authorization": "Bearer key"}
    read = partial(client.get, f"{prefix}/health", headers=headers)
    await until(read, lambda reply: reply.status_code == status)


async def until_changing(client: httpx.AsyncClient) -> None:
    """Waits until health tells of another model; that nothing is ready it may tell before."""
    await until(partial(client.get, "/health"), lambda reply: "Loading model" in reply.text)


@pytest.fixture
async def service() -> AsyncIterator[FakeService]:
    fake = FakeService()  # pyright: ignore[reportAbstractUsage] # what is missing is UNIMPLEMENTED
    yield fake
    await fake.stop()


@pytest.fixture
async def serve(service: FakeService) -> Serve:
    address = await service.start()

    def start(**options: object) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        return serving(address, **options)  # pyright: ignore[reportArgumentType] # forwarded as given

    return start


@pytest.fixture
async def client(serve: Serve) -> AsyncIterator[httpx.AsyncClient]:
    async with serve() as connected:
        yield connected
