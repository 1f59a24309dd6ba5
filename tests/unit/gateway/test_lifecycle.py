"""Clients that leave, stop reading or send too much; a service that comes and goes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from kvarts.v1 import generation_pb2, rebuild_pb2

from gateway import connection, peer_json, requests, sse
from gateway.peer_json import Json
from gateway.run import Run
from tests.unit.gateway.conftest import Serve, until_ready
from tests.unit.gateway.fake_service import FakeService, failing
from tests.unit.gateway.scripts import Call, Response, chunk, finished, started
from tests.waiting import until_so

# Of the scripted service.
_SLOTS = 2


class Gate:
    """A script that says when it runs and goes on when told."""

    def __init__(self, *, starts: bool) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        self._starts = starts

    async def __call__(self, call: Call) -> AsyncIterator[Response]:
        if self._starts:
            yield started(call)
        self.reached.set()
        await self.open.wait()
        if not self._starts:
            yield started(call)
        yield chunk("a", 5, 1)
        yield finished(call, 1)


async def dial(client: httpx.AsyncClient, body: bytes) -> asyncio.StreamWriter:
    """Sends a completion by hand, so that the connection can be dropped at will."""
    url = urlsplit(str(client.base_url))
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


@pytest.mark.parametrize("starts", [False, True], ids=["queued", "running"])
@pytest.mark.parametrize("stream", [b"false", b"true"], ids=["whole", "stream"])
async def test_a_client_that_leaves_cancels_its_call(
    client: httpx.AsyncClient, service: FakeService, *, starts: bool, stream: bytes
):
    gate = Gate(starts=starts)
    service.script = gate
    writer = await dial(client, b'{"prompt":"Hi","stream":' + stream + b"}")
    await gate.reached.wait()
    writer.close()
    await service.calls[0].was_cancelled.wait()


async def test_what_reads_a_call_ends_by_itself_when_the_client_leaves(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
):
    """gRPC never frees a read whose task was cancelled: half a kilobyte for each client."""
    ended, ways = asyncio.Event(), list[str]()
    read_all = vars(Run)["_read_all"]

    async def watched(*arguments: Any) -> None:
        try:
            await read_all(*arguments)
            ways.append("returned")
        except asyncio.CancelledError:
            ways.append("cancelled")
            raise
        finally:
            ended.set()

    monkeypatch.setattr(Run, "_read_all", watched)
    service.script = gate = Gate(starts=True)
    writer = await dial(client, b'{"prompt":"Hi","stream":true}')
    await gate.reached.wait()
    writer.close()
    await ended.wait()
    assert ways == ["returned"]
    await service.calls[0].was_cancelled.wait()


async def test_every_call_of_a_batch_is_cancelled_when_one_fails(
    client: httpx.AsyncClient, service: FakeService
):
    waiting = Gate(starts=True)

    async def script(call: Call) -> AsyncIterator[Response]:
        if len(call.request.tokens.ids) == 2:
            async for response in waiting(call):
                yield response
        await waiting.reached.wait()
        raise failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full", retry_s=3)

    service.script = script
    response = await client.post("/completion", json={"prompt": ["A", "BB"]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.headers["x-kvarts-reason"] == "QUEUE_FULL"
    assert response.json()["error"]["type"] == "unavailable_error"
    short = next(call for call in service.calls if len(call.request.tokens.ids) == 2)
    await short.was_cancelled.wait()


async def test_no_prompt_of_a_body_begins_if_one_is_too_long(
    client: httpx.AsyncClient, service: FakeService
):
    too_long = [5] * service.info.slot_context_tokens
    response = await client.post("/completion", json={"prompt": ["A", too_long], "n_predict": 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] == error["n_ctx"] == len(too_long)
    assert response.headers["x-kvarts-reason"] == "CONTEXT_OVERFLOW"
    assert not service.calls


async def test_no_more_calls_than_slots_are_open_for_one_body(
    client: httpx.AsyncClient, service: FakeService
):
    gate = Gate(starts=True)
    service.script = gate
    asking = asyncio.create_task(client.post("/completion", json={"prompt": ["A"] * 5}))
    await gate.reached.wait()
    most = len(service.calls)
    gate.open.set()
    assert len((await asking).json()) == 5
    assert most <= service.info.num_slots < len(service.calls)


async def test_the_number_of_prompts_is_bounded(client: httpx.AsyncClient):
    response = await client.post("/completion", json={"prompt": [[1]] * 1025})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == '"prompt" has 1025 prompts, the limit is 1024'


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_long_body_costs_is_not_done_on_the_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    """A body with a megabyte of biases once kept every other client waiting for seconds."""
    loop_thread, sizes, write = threading.get_ident(), list[int](), peer_json.write

    def watched(value: Json) -> bytes:
        text = write(value)
        if threading.get_ident() == loop_thread:
            sizes.append(len(text))
        return text

    monkeypatch.setattr(peer_json, "write", watched)
    monkeypatch.setattr(sse, "write", watched)
    body = {"prompt": "Hi", "stream": stream, "logit_bias": [[5, 0.5]] * 10_000}
    response = await client.post("/completion", json=body)
    assert response.status_code == 200
    assert len(response.content) > 100_000
    assert max(sizes, default=0) < 20_000


async def test_the_status_of_a_stream_goes_out_when_the_slot_starts(
    client: httpx.AsyncClient, service: FakeService
):
    gate = Gate(starts=True)
    service.script = gate
    body = {"prompt": "Hi", "stream": True}
    async with client.stream("POST", "/completion", json=body) as response:
        # The token has not been sampled yet: the gate is shut.
        assert response.status_code == 200
        gate.open.set()
        assert "data: " in (await response.aread()).decode()


async def test_silence_is_filled_with_comments(client: httpx.AsyncClient, service: FakeService):
    gate = Gate(starts=True)
    service.script = gate
    body = {"prompt": "Hi", "stream": True, "sse_ping_interval": 1}
    async with client.stream("POST", "/completion", json=body) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if text == ":\n\n":
                gate.open.set()
    assert text.startswith(":\n\ndata: ")
    assert '"stop":true' in text


async def test_a_client_that_stops_reading_does_not_slow_others(
    client: httpx.AsyncClient, service: FakeService
):
    async def endless(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        limit = 100_000 if call.request.stop else 1
        for index in range(limit):
            yield chunk("x" * 1000, 5, index + 1)
        yield finished(call, limit)

    service.script = endless
    writer = await dial(client, b'{"prompt":"Hi","stream":true,"stop":["z"]}')
    answers = [await client.post("/completion", json={"prompt": "Hi"}) for _ in range(20)]
    assert all(answer.json()["tokens_predicted"] == 1 for answer in answers)
    writer.close()
    await service.calls[0].was_cancelled.wait()


async def test_a_client_that_reads_nothing_is_given_up(serve: Serve, service: FakeService):
    async def endless(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        for index in range(1_000_000):
            yield chunk("x" * 10_000, 5, index + 1)

    service.script = endless
    async with serve(timeout_s=1) as client:
        writer = await dial(client, b'{"prompt":"Hi","stream":true}')
        while not service.calls:
            await client.get("/health")
        await service.calls[0].was_cancelled.wait()
        writer.close()


async def test_a_body_that_never_arrives_is_given_up(serve: Serve):
    async with serve(timeout_s=1) as client:
        url = urlsplit(str(client.base_url))
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


@pytest.mark.parametrize(
    "head", [b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\na: " + b"a" * 100_000]
)
async def test_heads_are_bounded(client: httpx.AsyncClient, head: bytes):
    url = urlsplit(str(client.base_url))
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"65536" in answer
    writer.close()


async def test_a_long_body_in_the_heads_packet_is_no_long_head(client: httpx.AsyncClient):
    for _ in range(3):
        response = await client.post("/tokenize", json={"content": "a" * 200_000})
        assert len(response.json()["tokens"]) == 200_000


@pytest.mark.parametrize("path", ["/completion", "/tokenize", "/v1/chat/completions"])
async def test_bodies_are_bounded_as_they_arrive(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr(connection, "MAX_BODY_BYTES", 1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    response = await client.post(path, content=parts())
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


async def test_not_ready_until_the_service_is_and_again_when_it_is_gone(
    serve: Serve, service: FakeService
):
    await service.set_serving(False)
    async with serve(waits=False) as client:
        for path in ("/health", "/props", "/no/such"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json() == {
                "error": {"message": "Loading model", "type": "unavailable_error", "code": 503}
            }
        assert (await client.get("/")).status_code == 200
        await service.set_serving(True)
        await until_ready(client)
        await service.set_serving(False)
        await until_ready(client, status=503)
        await service.set_serving(True)
        await until_ready(client)
        await service.stop()
        await until_ready(client, status=503)


@pytest.mark.parametrize(
    "state", [rebuild_pb2.REBUILD_STATE_DRAINING, rebuild_pb2.REBUILD_STATE_REBUILDING]
)
async def test_while_pools_are_split_anew_only_health_says_so(
    serve: Serve, service: FakeService, state: rebuild_pb2.RebuildState.ValueType
):
    async with serve() as client:
        service.pools.state = state
        await service.set_serving(False)
        await until_ready(client, status=503)
        told = (await client.get("/health")).json()["error"]
        assert (told["message"], told["code"]) == ("Rebuilding memory pools", 503)
        # All else goes through to the service, which lets generations wait.
        assert (await client.get("/pools")).json()["state"] in ("draining", "rebuilding")
        assert (await client.get("/props")).status_code == 200
        answer = await client.post("/completion", json={"prompt": "a", "n_predict": 1})
        assert answer.status_code == 200
        await service.set_serving(True)
        await until_ready(client)


@pytest.mark.parametrize(
    ("path", "body", "text_calls"),
    [
        ("/completion", {}, ["Tokenize"]),
        ("/completion", {"stream": True}, ["Tokenize"]),
        ("/completion", {"n_probs": 1, "stop": ["x"]}, ["Tokenize"]),
        ("/v1/completions", {"verbose": True}, ["Tokenize"]),
        ("/v1/completions", {"verbose": True, "stream": True}, ["Tokenize"]),
        ("/v1/completions", {"stream": True}, ["Tokenize"]),
    ],
)
async def test_nothing_is_asked_of_a_service_that_stops_to_end_an_answer(
    client: httpx.AsyncClient,
    service: FakeService,
    path: str,
    body: dict[str, Any],
    text_calls: list[str],
):
    asked: list[str] = []

    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        asked.extend([await service.text_calls.get() for _ in text_calls])
        service.is_stopping = True
        yield chunk("a", 5, 1)
        stop = generation_pb2.FINISH_REASON_STOP
        yield finished(call, 1, stop_string="x", finish_reason=stop)

    service.script = script
    async with asyncio.timeout(20):
        response = await client.post(path, json={"prompt": "Hi", **body})
    assert response.status_code == 200
    assert '"error"' not in response.text
    assert sorted(asked) == text_calls
    assert service.text_calls.empty()
    shows_prompt = path == "/completion" or "verbose" in body
    assert ('"prompt":"<s>Hi"' in response.text) is shows_prompt


async def test_every_sample_shows_the_text_of_its_prompt(client: httpx.AsyncClient):
    response = await client.post("/completion", json={"prompt": ["A", "A", "B"], "n_cmpl": 2})
    assert [answer["prompt"] for answer in response.json()] == ["<s>A"] * 4 + ["<s>B"] * 2


async def test_messages_are_made_when_their_turn_comes(
    serve: Serve, service: FakeService, monkeypatch: pytest.MonkeyPatch
):
    """Each holds the whole grammar: a small body of many prompts must not come to gigabytes."""
    made: list[int] = []
    waiting = asyncio.Event()

    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        await waiting.wait()
        yield finished(call, 0)

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(len(service.calls))
        return message(*args, **kwargs)

    message = requests._message  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(requests, "_message", counted)
    service.script = script
    body = {"prompt": ["a"] * 50, "grammar": "root ::= " + '"a" ' * 1000}
    async with serve() as client:
        answering = asyncio.create_task(client.post("/completion", json=body))
        await until_so(lambda: len(service.calls) == _SLOTS)
        assert len(made) == _SLOTS
        waiting.set()
        assert len((await answering).json()) == 50
    assert len(made) == 50


async def test_a_trigger_that_is_no_id_goes_on_as_one_that_there_is_not(
    client: httpx.AsyncClient, service: FakeService
):
    trigger = {"type": 0, "value": "x", "token": 5_000_000_000}
    body = {"prompt": "a", "grammar": 'root ::= "a"', "grammar_lazy": True}
    await client.post("/completion", json={**body, "grammar_triggers": [trigger]})
    assert service.calls[0].request.grammar_triggers[0].token_id == 2**32 - 1


async def test_what_cannot_be_read_is_an_error_not_a_hang(
    client: httpx.AsyncClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
):
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("no such field")

    monkeypatch.setattr(requests, "_message", broken)
    response = await client.post("/completion", json={"prompt": "Hi"})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")


async def test_a_call_that_the_service_cancels_is_an_error_not_a_hang(
    client: httpx.AsyncClient, service: FakeService
):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        raise failing(grpc.StatusCode.CANCELLED, "", "cancelled")

    service.script = script
    response = await client.post("/completion", json={"prompt": "Hi"})
    assert response.status_code == 500


async def test_a_stream_without_an_end_is_an_error_not_a_hang(
    client: httpx.AsyncClient, service: FakeService
):
    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)

    service.script = script
    response = await client.post("/completion", json={"prompt": "Hi"})
    assert response.status_code == 500
    assert "too early" in response.json()["error"]["message"]
