"""How long clients get nothing while the model is changed in place, against a warm start.

    python -m tests.bench.swap_gap A.gguf B.gguf

Both files lie in one folder. One client over gRPC and one over HTTP ask for a token again as soon
as they have it; four streams run when the change begins and must end whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import httpx
from kvarts.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc

from tests.e2e.programs import Program, running

_PAUSE_S = 0.01
_STREAMS, _STREAM_TOKENS = 4, 60
_PROMPT = "Once upon a time"

Ask = Callable[[], Awaitable[bool]]


def _request(count: int) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(
        text=_PROMPT, max_tokens=count, ignore_eos=True, cache_prompt=False
    )
    request.sampling.temperature = 0.0
    return request


class Caller:
    """Asks again as soon as it was answered; notes when."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._ends_s: list[float] = []
        self.num_refused = 0
        self.is_over = False

    async def work(self) -> None:
        while not self.is_over:
            if await self._ask():
                self._ends_s.append(time.monotonic())
            else:
                self.num_refused += 1
            await asyncio.sleep(_PAUSE_S)

    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in pairwise(self._ends_s))


class Doors:
    """Both ways to ask one server."""

    def __init__(self, channel: grpc.aio.Channel, http: httpx.AsyncClient) -> None:
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._model: Any = model_pb2_grpc.ModelServiceStub(channel)
        self._http = http

    async def stream(self, count: int) -> int:
        replies = self._generation.Generate(_request(count))
        return sum([reply.HasField("chunk") async for reply in replies])

    async def by_grpc(self) -> bool:
        try:
            return await self.stream(1) == 1
        except grpc.aio.AioRpcError:
            return False

    async def by_http(self) -> bool:
        body = {"prompt": _PROMPT, "n_predict": 1, "temperature": 0, "cache_prompt": False}
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.post("/completion", json=body)).status_code == 200
        return False

    async def load(self, name: str) -> model_pb2.LoadedModel:
        request = model_pb2.LoadModelRequest(path=name, replace_first=True)
        return [reply async for reply in self._model.LoadModel(request)][-1].loaded


async def _change(doors: Doors, name: str) -> str:
    callers = [Caller(doors.by_grpc), Caller(doors.by_http)]
    working = [asyncio.create_task(caller.work()) for caller in callers]
    await asyncio.sleep(1)
    streams = [asyncio.create_task(doors.stream(_STREAM_TOKENS)) for _ in range(_STREAMS)]
    await asyncio.sleep(0.3)
    loaded = await doors.load(name)
    whole = await asyncio.gather(*streams) == [_STREAM_TOKENS] * _STREAMS
    await asyncio.sleep(1)
    for caller in callers:
        caller.is_over = True
    await asyncio.gather(*working)
    gaps = ", ".join(f"{caller.longest_gap_s():.2f}" for caller in callers)
    refused = [caller.num_refused for caller in callers]
    unavailable_s = loaded.unavailable.ToMilliseconds() / 1e3
    return (
        f"to {name}: {gaps} s, unavailable {unavailable_s:.2f} s, refused {refused}, whole {whole}"
    )


def _served(folder: Path, name: str) -> Any:
    flags = ("-m", str(folder / name), "--model-dir", str(folder), "-c", "2048", "-np", "8")
    return running("kvarts-server", *flags, "--port", "0", "--grpc-port", "0")


async def _doors_of(program: Program, act: Callable[[Doors], Awaitable[None]]) -> None:
    address = await asyncio.to_thread(program.grpc_address)
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(base_url=program.http_url(), timeout=120) as http,
    ):
        await act(Doors(channel, http))


async def _answered(ask: Ask) -> None:
    while True:
        if await ask():
            return
        await asyncio.sleep(2 * _PAUSE_S)


async def main(one: Path, two: Path) -> None:
    for path in (one, two, one, two):
        begun_s = time.monotonic()
        with _served(one.parent, path.name) as program:

            async def first(doors: Doors, begun_s: float = begun_s, name: str = path.name) -> None:
                for ask in (doors.by_grpc, doors.by_http):
                    await _answered(ask)
                    print(f"start of {name}: {time.monotonic() - begun_s:.2f} s", flush=True)

            await _doors_of(program, first)
    with _served(one.parent, one.name) as program:

        async def change(doors: Doors) -> None:
            await _answered(doors.by_http)
            for path in (two, one, two, one):
                print(await _change(doors, path.name), flush=True)

        await _doors_of(program, change)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
