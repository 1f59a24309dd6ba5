"""Plain HTTP: one answer in two shapes, many clients, and clients that leave or stop reading."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from kvarts.v1 import generation_pb2, model_pb2

from tests.e2e.conftest import KEY, NUM_SLOTS, Server
from tests.e2e.rpc import Client
from tests.waiting import until

pytestmark = pytest.mark.slow

Json = dict[str, Any]
# Runs until its slot is full, some 4000 steps.
ENDLESS: Json = {"prompt": "the day", "temperature": 0, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def streaming(http: httpx.AsyncClient, body: Json) -> AsyncGenerator[AsyncIterator[Json]]:
    """The events of a stream. It opens when the slot starts, and closes with the context."""
    async with http.stream("POST", "/completion", json=body) as response:
        assert response.status_code == 200
        # Named, since a generator that nobody holds is closed, and its connection with it.
        events = (
            json.loads(line.removeprefix("data: "))
            async for line in response.aiter_lines()
            if line.startswith("data: ")
        )
        yield events


async def text_of(http: httpx.AsyncClient, body: Json) -> str:
    reply = await http.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["content"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 7}])
async def test_a_stream_says_what_one_answer_says(http: httpx.AsyncClient, sampling: Json) -> None:
    body: Json = {"prompt": "she said", "n_predict": 24, **sampling}
    whole = (await http.post("/completion", json=body)).json()
    async with streaming(http, {**body, "stream": True}) as events:
        seen = [event async for event in events]
    assert "".join(event["content"] for event in seen) == whole["content"] != ""
    assert [event["stop"] for event in seen] == [False] * (len(seen) - 1) + [True]
    same = ("stop_type", "tokens_predicted", "tokens_evaluated", "truncated", "prompt")
    assert {key: seen[-1][key] for key in same} == {key: whole[key] for key in same}


async def test_256_clients_are_served_or_told_when_to_come_back(
    http: httpx.AsyncClient, server: Server
) -> None:
    body: Json = {"prompt": "the day", "n_predict": 32, "temperature": 0, "ignore_eos": True}
    replies = await asyncio.gather(*(http.post("/completion", json=body) for _ in range(256)))
    served = [reply for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code == 503]
    assert len(served) + len(refused) == 256
    assert len(served) >= NUM_SLOTS
    assert {reply.json()["content"] for reply in served} == {await text_of(http, body)}
    assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
    assert {reply.headers["x-kvarts-reason"] for reply in refused} <= {"QUEUE_FULL"}
    await server.rpc.idle()


async def test_64_clients_on_8_slots_all_complete(http: httpx.AsyncClient, server: Server) -> None:
    before = (await server.rpc.info()).counters
    bodies: list[Json] = [
        {
            "prompt": f"{'the ' * (i % 9)}day",
            "n_predict": 8 + i % 5,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(64)
    ]
    replies = await asyncio.gather(*(http.post("/completion", json=body) for body in bodies))
    assert [reply.status_code for reply in replies] == [200] * 64
    predicted = [reply.json()["tokens_predicted"] for reply in replies]
    assert predicted == [body["n_predict"] for body in bodies]
    # Each says what it says alone, whoever its neighbours were.
    for index in (0, 13, 37, 63):
        assert replies[index].json()["content"] == await text_of(http, bodies[index])
    after = (await server.rpc.info()).counters
    assert after.requests_finished - before.requests_finished == 64 + 4
    assert after.requests_failed == before.requests_failed


async def test_64_streams_on_8_slots_start_in_turn_and_all_complete(
    http: httpx.AsyncClient, server: Server
) -> None:
    finished = (await server.rpc.info()).counters.requests_finished
    started: list[int] = []
    ended: dict[int, int] = {}

    async def read(index: int) -> None:
        body: Json = {"prompt": "the day", "n_predict": 16 + index % 7, "return_progress": True}
        async with streaming(http, {**ENDLESS, **body}) as events:
            async for event in events:
                if index not in started:
                    started.append(index)
                ended[index] = event["tokens_predicted"] if event["stop"] else -1

    def arrived(info: model_pb2.ServerInfo) -> int:
        gauges = info.gauges
        done = info.counters.requests_finished - finished
        return done + gauges.running_requests + gauges.queued_requests

    async with asyncio.TaskGroup() as clients:
        for index in range(64):
            clients.create_task(read(index))
            await until(server.rpc.info, lambda info, count=index: arrived(info) > count)
    assert ended == {index: 16 + index % 7 for index in range(64)}
    # Nobody waits for one who came later; those that start in one step may be heard in any order.
    assert all(abs(place - index) < NUM_SLOTS for place, index in enumerate(started)), started


async def test_waiting_requests_start_in_the_order_of_their_arrival(server: Server) -> None:
    started: list[int] = []

    async def generate(index: int) -> None:
        request = generation_pb2.GenerateRequest(text=f"{'to ' * index}day", max_tokens=6)
        responses = aiter(_call(server.rpc, request))
        assert (await anext(responses)).HasField("started")
        started.append(index)
        async for _ in responses:
            pass

    await asyncio.gather(*(generate(index) for index in range(64)))
    assert sorted(started) == list(range(64))
    # Those that start in one step may be heard of in any order.
    assert all(abs(place - index) < NUM_SLOTS for place, index in enumerate(started)), started


async def test_a_client_that_stops_reading_does_not_slow_others(
    http: httpx.AsyncClient, server: Server
) -> None:
    with _deaf_client(server, {**ENDLESS, "n_predict": 1500, "n_probs": 10}):
        await server.rpc.running(1)
        body: Json = {"prompt": "he was big", "n_predict": 16, "temperature": 0}
        texts = await asyncio.gather(*(text_of(http, body) for _ in range(2 * NUM_SLOTS)))
        assert len(set(texts)) == 1
        # The engine never waited: the answer that nobody reads came to its end.
        await server.rpc.idle()


async def test_a_client_that_leaves_while_it_waits_is_forgotten(
    http: httpx.AsyncClient, server: Server
) -> None:
    async with AsyncExitStack() as busy:
        for _ in range(NUM_SLOTS):
            await anext(await busy.enter_async_context(streaming(http, ENDLESS)))
        waiting = asyncio.create_task(text_of(http, {"prompt": "the", "n_predict": 1}))
        await server.rpc.queued(1)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await server.rpc.queued(0)
        # None of the others was disturbed.
        assert (await server.rpc.info()).gauges.running_requests == NUM_SLOTS
    await server.rpc.idle()


async def test_a_client_that_leaves_during_its_prompt_frees_everything(
    http: httpx.AsyncClient, server: Server
) -> None:
    before = (await server.rpc.info()).counters
    prompt = [300 + i % 50 for i in range(4000)]
    body: Json = {**ENDLESS, "prompt": prompt, "return_progress": True, "cache_prompt": False}
    async with streaming(http, body) as events:
        progress = (await anext(events))["prompt_progress"]
        assert progress["processed"] < progress["total"] == len(prompt)
    await server.rpc.cancelled(before.requests_cancelled + 1)
    await server.rpc.idle()
    after = (await server.rpc.info()).counters
    assert after.prompt_tokens_evaluated - before.prompt_tokens_evaluated < len(prompt)
    assert after.generated_tokens == before.generated_tokens


async def test_metrics_show_empty_pools_when_nothing_runs(
    http: httpx.AsyncClient, server: Server
) -> None:
    await text_of(http, {"prompt": "so", "n_predict": 4})
    await server.rpc.idle()
    lines = (await http.get("/metrics")).text.splitlines()
    values = {
        name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")
    }
    assert values["llamacpp:requests_processing"] == 0
    assert values["llamacpp:requests_deferred"] == 0
    units = {
        state: values[f'kvarts_pool_units{{pool="kv",state="{state}"}}']
        for state in ("free", "used", "pinned", "cached")
    }
    pool = (await http.get("/pools")).json()["pools"][0]
    assert pool["kind"] == "kv"
    assert units["used"] == 0
    assert units["free"] + units["pinned"] + units["cached"] == pool["size"]


def _call(rpc: Client, request: generation_pb2.GenerateRequest) -> Any:
    return rpc.generation.Generate(request, metadata=rpc.metadata)


def _deaf_client(server: Server, body: Json) -> socket.socket:
    """Sends a request over a connection with hardly any buffer, and never reads."""
    content = json.dumps(body).encode()
    head = (
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.sendall(head.encode() + content)
    return connection
