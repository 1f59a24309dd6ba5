"""One signal to a server with its hands full: check 34, over gRPC and over the gateway.

What is asked of a stop amid a load stands in `test_process`, amid a change of models in
`test_model_swap`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvarts.v1 import (
    generation_pb2,
    rebuild_pb2,
    rebuild_pb2_grpc,
    slot_pb2,
)

from service.server import READY_SERVICE
from tests.contract.serving import read_failure
from tests.e2e.conftest import NUM_SLOTS, Start
from tests.e2e.programs import Program
from tests.e2e.rpc import Client, client
from tests.e2e.test_process import ended, ready
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_HALF = NUM_SLOTS // 2
_NUM_WAITING_EACH = 10
# Enough that none ends before the signal is sent.
_TOKENS = 1500
# Nobody waits for it: it is how long a stop could take if it did not end what it should.
_LONG = ("--shutdown-timeout", "400")
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class _Server:
    """A server that is ready, and both of its doors."""

    program: Program
    http: httpx.AsyncClient
    rpc: Client
    channel: grpc.aio.Channel

    @property
    def rebuild(self) -> Any:
        return rebuild_pb2_grpc.RebuildServiceStub(self.channel)

    def signal(self) -> None:
        self.program.process.send_signal(signal.SIGTERM)

    async def watch(self) -> Any:
        """A watch on whether the server is ready, which it is."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        return watch

    async def is_ready(self) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        return reply.status != _NOT_SERVING


@asynccontextmanager
async def _serving(start: Start, *flags: str) -> AsyncGenerator[_Server]:
    with start("--grpc-port", "0", *flags) as program:
        async with (
            ready(program) as http,
            client(program.grpc_address()) as rpc,
            grpc.aio.insecure_channel(program.grpc_address()) as channel,
        ):
            yield _Server(program, http, rpc, channel)


async def _over_http(http: httpx.AsyncClient) -> int:
    """Streams a long answer; returns how many tokens it says it has."""
    body = {"prompt": "the day", "ignore_eos": True, "stream": True, "n_predict": _TOKENS}
    async with http.stream("POST", "/completion", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    return json.loads(lines[-1].removeprefix("data: "))["tokens_predicted"]


async def _over_rpc(rpc: Client) -> int:
    request = generation_pb2.GenerateRequest(text="the day", ignore_eos=True, max_tokens=_TOKENS)
    responses = [response async for response in rpc.generation.Generate(request)]
    return responses[-1].finished.completion_tokens


async def _refused_by_http(http: httpx.AsyncClient, *, stream: bool) -> tuple[int, str, bool]:
    """Waits for an answer that is a refusal: its status, cause, and whether it says when again."""
    reply = await http.post("/completion", json={"prompt": "the", "stream": stream})
    return reply.status_code, reply.headers["x-kvarts-reason"], "retry-after" in reply.headers


async def _refused_by_rpc(rpc: Client) -> tuple[grpc.StatusCode, str, bool]:
    request = generation_pb2.GenerateRequest(text="the", max_tokens=4)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in rpc.generation.Generate(request):
            pass
    refused = read_failure(caught.value)
    return refused.code, refused.reason, refused.retry_s is not None


async def _busy(it: _Server) -> tuple[list[asyncio.Task[int]], list[asyncio.Task[Any]]]:
    """Half of what runs and of what waits comes by each door."""
    works = [_over_http(it.http) for _ in range(_HALF)] + [_over_rpc(it.rpc) for _ in range(_HALF)]
    running = [asyncio.create_task(work) for work in works]
    await it.rpc.running(NUM_SLOTS)
    waits: list[Coroutine[Any, Any, Any]] = []
    for index in range(_NUM_WAITING_EACH):
        waits += [_refused_by_http(it.http, stream=index % 2 == 0), _refused_by_rpc(it.rpc)]
    waiting = [asyncio.create_task(wait) for wait in waits]
    await it.rpc.queued(2 * _NUM_WAITING_EACH)
    return running, waiting


async def test_what_waits_is_refused_and_what_runs_is_finished(start: Start) -> None:
    async with _serving(start, *_LONG) as it:
        running, waiting = await _busy(it)
        watch = await it.watch()
        it.signal()
        assert (await watch.read()).status == _NOT_SERVING
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # Who is refused and asks at once whether to come back is told that not.
        assert not await it.is_ready()
        refused = set(await asyncio.gather(*waiting))
        assert refused == {
            (503, "SHUTTING_DOWN", True),
            (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", True),
        }
        # Nothing was cut, and none ran but those eight.
        assert await asyncio.gather(*running) == [_TOKENS] * NUM_SLOTS
        assert await ended(it.program) == 0
        assert "Traceback" not in it.program.output.text()


async def test_a_second_signal_ends_all_at_once(start: Start) -> None:
    async with _serving(start, *_LONG) as it:
        running, waiting = await _busy(it)
        watch = await it.watch()
        it.signal()
        assert (await watch.read()).status == _NOT_SERVING
        it.signal()
        assert await ended(it.program) == 128 + signal.SIGTERM
        answers = await asyncio.gather(*running, *waiting, return_exceptions=True)
        assert _TOKENS not in answers
        assert "Traceback" not in it.program.output.text()


async def test_saves_that_were_answered_are_whole_and_none_is_cut(
    start: Start, tmp_path: Path
) -> None:
    flags = ("--slot-save-path", str(tmp_path))
    prompts = [[5 + (7 * i + slot_id) % 50 for i in range(600)] for slot_id in range(NUM_SLOTS)]
    saved: dict[str, int] = {}
    async with _serving(start, *flags) as it:
        for slot_id, prompt in enumerate(prompts):
            await _answer(it.http, prompt, slot_id)
        saving = [asyncio.create_task(_save_on(it, slot_id, saved)) for slot_id in range(NUM_SLOTS)]
        while len(saved) < NUM_SLOTS:
            await asyncio.wait(saving, timeout=0.01)
            assert not any(task.done() for task in saving)
        it.signal()
        await asyncio.gather(*saving)
        assert await ended(it.program) == 0
        assert "Traceback" not in it.program.output.text()
    names = sorted(path.relative_to(tmp_path).as_posix() for path in _files(tmp_path))
    async with _serving(start, *flags) as it:
        listed = await it.rpc.slots.ListSlotFiles(slot_pb2.ListSlotFilesRequest())
        # Nothing half done lies about, and what was answered is there.
        assert len(names) == len(listed.files)
        assert saved.keys() <= {file.filename for file in listed.files}
        for file in listed.files:
            slot_id = int(file.filename.split("-")[1])
            reply = await it.http.post(
                f"/slots/{slot_id}?action=restore", json={"filename": file.filename}
            )
            assert reply.status_code == 200, reply.text
            assert reply.json()["n_restored"] == saved.get(file.filename, len(prompts[slot_id]) + 7)


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


async def _answer(http: httpx.AsyncClient, prompt: list[int], slot_id: int) -> None:
    body = {"prompt": prompt, "id_slot": slot_id, "n_predict": 8, "ignore_eos": True}
    assert (await http.post("/completion", json=body)).status_code == 200


async def _save_on(it: _Server, slot_id: int, saved: dict[str, int]) -> None:
    """Saves a slot over and over, now under a new name and now over a file, until it is refused."""
    save = _save_by_http if slot_id % 2 else _save_by_rpc
    for turn in itertools.count():
        name = f"slot-{slot_id}-{turn % 3}"
        count = await save(it, slot_id, name)
        if count is None:
            return
        saved[name] = count


async def _save_by_http(it: _Server, slot_id: int, name: str) -> int | None:
    try:
        reply = await it.http.post(f"/slots/{slot_id}?action=save", json={"filename": name})
    except httpx.TransportError:
        # The next one comes when the door is shut already.
        return None
    if reply.status_code == 200:
        return reply.json()["n_saved"]
    assert reply.status_code == 503
    return None


async def _save_by_rpc(it: _Server, slot_id: int, name: str) -> int | None:
    try:
        request = slot_pb2.SaveSlotRequest(slot_id=slot_id, filename=name)
        return (await it.rpc.slots.SaveSlot(request)).saved_tokens
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None


async def test_a_rebuild_that_waits_for_what_runs_gives_way(start: Start) -> None:
    async with _serving(start, *_LONG) as it:
        running, waiting = await _busy(it)
        rebuild = asyncio.create_task(_rebuilt(it, drain_s=300, pages=900))
        await _in_state(it, rebuild_pb2.REBUILD_STATE_DRAINING)
        it.signal()
        assert await rebuild == "SHUTTING_DOWN"
        assert {cause for _, cause, _ in await asyncio.gather(*waiting)} == {"SHUTTING_DOWN"}
        assert await asyncio.gather(*running) == [_TOKENS] * NUM_SLOTS
        assert await ended(it.program) == 0
        assert "Traceback" not in it.program.output.text()


async def test_a_stop_amid_a_rebuild_leaves_nothing_behind(start: Start) -> None:
    async with _serving(start) as it:

        async def rebuild_on() -> str:
            for pages in itertools.cycle((900, 1000)):
                cause = await _rebuilt(it, drain_s=10, pages=pages)
                if cause is not None:
                    return cause
            raise AssertionError("there is always another size")

        rebuilding = asyncio.create_task(rebuild_on())
        await _in_state(it, rebuild_pb2.REBUILD_STATE_REBUILDING)
        it.signal()
        assert await ended(it.program) == 0
        assert await rebuilding in {"SHUTTING_DOWN", ""}
        assert "Traceback" not in it.program.output.text()


async def _rebuilt(it: _Server, *, drain_s: int, pages: int) -> str | None:
    """Asks for so many pages; returns why not, "" where the server is gone, None if they are there."""
    request = rebuild_pb2.RebuildRequest(
        target=rebuild_pb2.PoolSizes(kv_pages=pages),
        drain_timeout=duration_pb2.Duration(seconds=drain_s),
    )
    try:
        await it.rebuild.Rebuild(request)
    except grpc.aio.AioRpcError as error:
        return read_failure(error).reason
    return None


async def _in_state(it: _Server, state: rebuild_pb2.RebuildState.ValueType) -> None:
    async def read() -> Any:
        return await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())

    await until(read, lambda pools: pools.state == state)
