"""Check 22: floods of HTTP/2 frames cost neither memory nor the others' health checks.

Who floods is no client of gRPC; beside it a health client asks all the time.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvarts.v1 import generation_pb2

from tests.e2e.conftest import NUM_SLOTS, Start
from tests.e2e.programs import Program
from tests.e2e.raw_http2 import (
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    PING,
    SETTINGS,
    Attacker,
    attacking,
    begun,
    call_fields,
    frame,
    reset,
)
from tests.e2e.rpc import Client, client
from tests.waiting import until

pytestmark = pytest.mark.slow

_RESETS, _CONNECTIONS = 20_000, 10
_FLOOD_S = 3.0
# A round is over before health was asked for ten times; of less than a hundred there is no 99th part,
# only the longest, which is the first: it waits for its connection.
_ROUNDS = 25
_MIB = 1 << 20
_MOST_BYTES = 32 * _MIB
_HEALTH_P99_S = 0.5
# Slots, queue and what the service adds for everything that is no generation.
_STREAM_LIMIT = NUM_SLOTS + 256 + 256
# One entry of a SETTINGS frame: the streams that may be open at the same time.
_MAX_STREAMS = struct.pack(">HI", 3, 100)
_PATH = "/kvarts.v1.GenerationService/Generate"
_PROBE = generation_pb2.GenerateRequest(text="the day", max_tokens=8, cache_prompt=False)
_PROBE.sampling.temperature = 0.0


@dataclass
class Seen:
    """What others saw during a flood: seconds of health checks, calls being served."""

    health_s: list[float] = field(default_factory=list[float])
    open_calls: list[int] = field(default_factory=list[int])

    def p99_s(self) -> float:
        return sorted(self.health_s)[int(len(self.health_s) * 0.99)]


@dataclass(frozen=True)
class Target:
    """A server of its own, and what it said before anybody flooded it."""

    program: Program
    rpc: Client
    said: str

    def rss(self) -> int:
        text = Path(f"/proc/{self.program.process.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def says(self) -> str:
        """Its answer; "" while calls that were given up still fill what a method lets wait."""
        try:
            replies = [reply async for reply in self.rpc.generation.Generate(_PROBE)]
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
            return ""
        return "".join(reply.chunk.text for reply in replies)

    async def withstands(self, flood: Callable[[str], Coroutine[Any, Any, object]]) -> Seen:
        """Runs a flood of the address with health asked for meanwhile; then all is as before."""
        before, seen, over = self.rss(), Seen(), asyncio.Event()
        watching = [
            asyncio.create_task(self._ask_health(seen, over)),
            asyncio.create_task(self._count_calls(seen, over)),
        ]
        # A loop of its own, or it would keep the health client waiting itself.
        await asyncio.to_thread(asyncio.run, flood(self.program.grpc_address()))
        over.set()
        await asyncio.gather(*watching)
        await until(self.says, lambda said: said == self.said)
        await self.rpc.idle()
        grown = await until(self._growth_over(before), lambda bytes_: bytes_ <= _MOST_BYTES)
        print(
            f"health p99 {seen.p99_s() * 1e3:.0f} ms of {len(seen.health_s)}, "
            f"calls at most {max(seen.open_calls)}, memory {grown / _MIB:+.1f} MiB"
        )
        assert seen.p99_s() < _HEALTH_P99_S
        return seen

    def _growth_over(self, before: int) -> Callable[[], Coroutine[Any, Any, int]]:
        """What gRPC has not answered yet when the flood ends is given back some seconds later."""

        async def growth() -> int:
            return self.rss() - before

        return growth

    async def _ask_health(self, seen: Seen, over: asyncio.Event) -> None:
        async with grpc.aio.insecure_channel(self.program.grpc_address()) as channel:
            # The health package has no types.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while not over.is_set():
                begun_s = time.monotonic()
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
                seen.health_s.append(time.monotonic() - begun_s)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(0.005)

    async def _count_calls(self, seen: Seen, over: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=30) as session:
            while not over.is_set():
                text = (await session.get(f"{self.program.metrics_url()}/metrics")).text
                (line,) = [x for x in text.splitlines() if x.startswith("kvarts_open_calls ")]
                seen.open_calls.append(int(float(line.split()[1])))
                await asyncio.sleep(0.02)


@asynccontextmanager
async def _target(start: Start) -> AsyncGenerator[Target]:
    with start("--grpc-port", "0", "--metrics-port", "0", "--cache-ram", "0") as program:
        async with client(program.ready().grpc_address()) as rpc:
            unknown = Target(program, rpc, "")
            yield Target(program, rpc, await unknown.says())


@pytest.fixture
async def target(start: Start) -> AsyncGenerator[Target]:
    async with _target(start) as target:
        yield target


async def _reset_all_rapidly(address: str) -> None:
    for _ in range(_ROUNDS):
        await asyncio.gather(*(_reset_rapidly(address) for _ in range(_CONNECTIONS)))


async def _reset_rapidly(address: str) -> None:
    """As fast as the connection takes them; one that was closed on us is opened again."""
    fields, left = call_fields(_PATH), _RESETS // _CONNECTIONS
    while left:
        async with attacking(address) as attacker:
            stream = 1
            while left:
                left -= 1
                if not await attacker.send(begun(stream, fields) + reset(stream)):
                    break
                stream += 2


async def test_rapid_resets(target: Target) -> None:
    seen = await target.withstands(_reset_all_rapidly)
    assert max(seen.open_calls) <= _STREAM_LIMIT * _CONNECTIONS


async def _pour(address: str, data: bytes) -> None:
    """Sends such frames for a while, on connections that are opened again when they are closed."""
    over_s = time.monotonic() + _FLOOD_S
    while time.monotonic() < over_s:
        async with attacking(address) as attacker:
            while time.monotonic() < over_s:
                if not await attacker.send(data * 100):
                    break
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(frame(PING, 0, 0, bytes(8)), id="ping"),
        pytest.param(frame(SETTINGS, 0, 0), id="settings"),
        pytest.param(frame(SETTINGS, 0, 0, _MAX_STREAMS * 100), id="settings of 100 entries"),
    ],
)
async def test_floods_of_frames_that_want_an_answer(target: Target, data: bytes) -> None:
    await target.withstands(lambda address: _pour(address, data))


async def test_floods_of_header_blocks_of_a_mebibyte(target: Target) -> None:
    async def flood(address: str) -> None:
        await asyncio.gather(*(_continue_again_and_again(address) for _ in range(_CONNECTIONS)))

    await target.withstands(flood)


async def _continue_again_and_again(address: str) -> None:
    over_s = time.monotonic() + _FLOOD_S
    while time.monotonic() < over_s:
        async with attacking(address) as attacker:
            await _continue_for_ever(attacker)


async def _continue_for_ever(attacker: Attacker) -> bool:
    """A header block of 1 MiB that does not end; whether the server let it come."""
    filler = b"".join(b"\x00\x03x-a\x78" + bytes([97]) * 120 for _ in range(120))
    await attacker.send(frame(HEADERS, 0, 1, call_fields(_PATH)))
    for _ in range(_MIB // len(filler) + 1):
        if not await attacker.send(frame(CONTINUATION, 0, 1, filler)):
            return False
    return await attacker.send(frame(CONTINUATION, END_HEADERS, 1, b""))


async def test_a_header_block_of_a_mebibyte(target: Target) -> None:
    async def flood(address: str) -> None:
        for _ in range(_CONNECTIONS):
            async with attacking(address) as attacker:
                await _continue_for_ever(attacker)

    await target.withstands(flood)
