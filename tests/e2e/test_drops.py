"""A thousand connections, each dropped somewhere, leave nothing behind in either process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import Start, healthy, http_client
from tests.e2e.programs import Program
from tests.e2e.rpc import Client, client
from tests.waiting import until

pytestmark = pytest.mark.slow

_CONNECTIONS = 1000
_AT_ONCE = 50
_MIB = 1 << 20
# Pools of threads grow to their bound as they are needed.
_POOLED_THREADS = 8


@pytest.fixture
async def target(start: Start) -> AsyncGenerator[tuple[Program, Client]]:
    # Prompts that are kept in memory are not left behind, so none is.
    with start("--grpc-port", "0", "--cache-ram", "0") as program:
        await healthy(program.ready().http_url())
        async with client(program.grpc_address()) as rpc:
            yield program, rpc


def _processes(program: Program) -> list[int]:
    """The server and its gateway."""
    pid = program.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def _held(program: Program) -> list[tuple[int, int]]:
    """Open files and threads of each."""
    folders = [Path(f"/proc/{pid}") for pid in _processes(program)]
    return [(len(os.listdir(f / "fd")), len(os.listdir(f / "task"))) for f in folders]


def _rss(program: Program) -> list[int]:
    sizes: list[int] = []
    for pid in _processes(program):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("VmRSS:")]
        sizes.append(int(line.split()[1]) << 10)
    return sizes


def _request(draw: random.Random) -> bytes:
    """A request that runs for long, at any of the doors that stream, with or without a stream."""
    path = draw.choice(("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages"))
    says = " ".join(draw.choices(("the", "day", "little", "big"), k=draw.randint(1, 300)))
    body = {"prompt": says, "messages": [{"role": "user", "content": says}], "max_tokens": 2000}
    body |= {"ignore_eos": True, "stream": draw.random() < 0.7}
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def _drop(program: Program, seed: int) -> None:
    """Opens, sends all or a part of a request, perhaps reads a little, and is gone."""
    draw = random.Random(seed)
    address = urlsplit(program.http_url())
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = _request(draw)
    stop = draw.choice(("nothing", "a part", "all", "a while", "read", "read"))
    if stop == "a part":
        data = data[: draw.randrange(1, len(data))]
    if stop != "nothing":
        writer.write(data)
        await writer.drain()
    if stop == "a while":
        await asyncio.sleep(draw.random() / 5)
    elif stop == "read":
        # The head of a stream comes when its slot starts, another answer never so early.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await reader.read(1 << 16)
    if draw.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


async def test_a_thousand_dropped_connections_leave_nothing(
    target: tuple[Program, Client],
) -> None:
    program, rpc = target
    turns = asyncio.Semaphore(_AT_ONCE)

    async def run(seed: int) -> None:
        async with turns:
            await _drop(program, seed)

    # What is made once: threads of pools, buffers, channels.
    await asyncio.gather(*(run(-seed - 1) for seed in range(_CONNECTIONS // 2)))
    await rpc.idle()
    async with http_client(program.http_url()) as session:
        probe = {"prompt": "the day", "n_predict": 8, "temperature": 0, "cache_prompt": False}
        said = (await session.post("/completion", json=probe)).json()["content"]
    await rpc.idle()
    held, sizes = _held(program), _rss(program)

    await asyncio.gather(*(run(seed) for seed in range(_CONNECTIONS)))
    await rpc.idle()

    async def files() -> list[int]:
        return [count for count, _ in _held(program)]

    # The kernel tells of a closed connection a little later.
    await until(files, lambda now: now <= [count for count, _ in held])
    for (_, before), (_, after) in zip(held, _held(program), strict=True):
        assert after - before <= _POOLED_THREADS
    for before, after in zip(sizes, _rss(program), strict=True):
        assert after - before <= 16 * _MIB
    counters = (await rpc.info()).counters
    # They were dropped at work too, not only at the door.
    assert counters.requests_started > _CONNECTIONS // 5
    assert counters.requests_started == counters.requests_cancelled + counters.requests_finished
    async with http_client(program.http_url()) as session:
        assert (await session.post("/completion", json=probe)).json()["content"] == said
