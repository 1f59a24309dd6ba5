"""Another model in a running kvarts-server: its streams end whole, and a stop amid it ends everything."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from kvarts.v1 import common_pb2, generation_pb2, model_pb2

from tests.e2e.conftest import Start, healthy, http_client
from tests.e2e.programs import Program
from tests.e2e.rpc import Client, client
from tests.ggufs import TinyLlama, write_llama
from tests.waiting import until

pytestmark = pytest.mark.slow

NEXT = "next.gguf"
_TOKENS = 300


@dataclass(frozen=True)
class Swapping:
    """A server that may serve `NEXT`, and clients of both doors."""

    program: Program
    http: httpx.AsyncClient
    rpc: Client

    async def generate(self, num_tokens: int, begun: asyncio.Event | None = None) -> list[int]:
        request = generation_pb2.GenerateRequest(
            tokens=common_pb2.TokenIds(ids=[1, 5, 6, 7]),
            sampling=generation_pb2.SamplingParams(temperature=0),
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        tokens: list[int] = []
        async for event in self.rpc.generation.Generate(request):
            if begun is not None:
                begun.set()
            if event.HasField("chunk"):
                tokens.append(event.chunk.token_id)
        return tokens

    async def is_away(self) -> bool:
        return (await self.http.get("/health")).status_code == 503

    async def models(self) -> list[str]:
        return [one["id"] for one in (await self.http.get("/v1/models")).json()["data"]]

    def load(self) -> model_pb2.LoadModelRequest:
        return model_pb2.LoadModelRequest(path=NEXT, replace_first=True)


@asynccontextmanager
async def swapping(start: Start, folder: Path, *flags: str) -> AsyncGenerator[Swapping]:
    write_llama(folder / NEXT, TinyLlama(context=4096, seed=7))
    with start("--grpc-port", "0", "--model-dir", str(folder), *flags) as program:
        url = (await asyncio.to_thread(program.ready)).http_url()
        await healthy(url)
        async with http_client(url) as http, client(program.grpc_address()) as rpc:
            yield Swapping(program, http, rpc)


async def test_streams_end_whole_and_who_comes_gets_the_new_model(
    start: Start, tmp_path: Path
) -> None:
    async with swapping(start, tmp_path) as it:
        old = await it.generate(_TOKENS)
        begun = [asyncio.Event() for _ in range(4)]
        running = [asyncio.create_task(it.generate(_TOKENS, one)) for one in begun]
        await asyncio.gather(*(one.wait() for one in begun))
        body = {"path": NEXT, "replace_first": True}
        changing = asyncio.create_task(it.http.post("/admin/models/load", json=body))
        await until(it.is_away, bool)
        waiting = [asyncio.create_task(it.generate(_TOKENS)) for _ in range(3)]
        assert await asyncio.gather(*running) == [old] * 4
        loaded = await changing
        assert loaded.status_code == 200, loaded.text
        new = await it.generate(_TOKENS)
        assert new != old
        assert await asyncio.gather(*waiting) == [new] * 3
        # It is called as it was asked for, by whomever one asks.
        assert loaded.json()["model"]["id"] == NEXT
        assert await it.models() == [NEXT]
        question = await it.http.post("/admin/models/load", json=body | {"validate_only": True})
        assert question.json()["model"]["id"] == NEXT


@pytest.mark.parametrize("stage", [model_pb2.LOAD_STAGE_DRAIN, model_pb2.LOAD_STAGE_COMPILE])
async def test_sigterm_amid_a_change_ends_both_processes(
    start: Start, tmp_path: Path, stage: model_pb2.LoadStage.ValueType
) -> None:
    async with swapping(start, tmp_path, "--shutdown-timeout", "2") as it:
        begun = asyncio.Event()
        running = asyncio.create_task(it.generate(4000, begun))
        await begun.wait()
        if stage != model_pb2.LOAD_STAGE_DRAIN:
            running.cancel()
        change = it.rpc.model.LoadModel(it.load())
        async for told in change:
            if told.progress.stage == stage:
                break
        it.program.process.send_signal(signal.SIGTERM)
        # Of both processes: they share the output whose end is waited for.
        assert await asyncio.to_thread(it.program.exit_status) == 0
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in change:
                pass
        await asyncio.gather(running, return_exceptions=True)
        assert "Traceback" not in it.program.output.text()
