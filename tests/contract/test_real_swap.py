"""Two models in files, one in the other's place: nothing here is a fake."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvarts.v1 import generation_pb2_grpc, lora_pb2, lora_pb2_grpc, model_pb2, model_pb2_grpc

from engine.types import EngineConfig, StartAdapter
from service.loader import load_named
from service.server import Server
from tests.adapters import TinyAdapter, write_adapter
from tests.contract.serving import GenerateRequest, SamplingParams, failure
from tests.contract.test_loaded_model import options_for
from tests.ggufs import TinyLlama, write_llama

A, B = "a.gguf", "b.gguf"
ATTN_Q = "blk.0.attn_q.weight"
CONFIG = EngineConfig(context_tokens=512, num_slots=8, chunk_tokens=32)
PROMPTS = tuple(tuple(range(3 + n, 11 + n)) for n in range(8))


@dataclass
class Swapping:
    """A server of real models and its stubs."""

    channel: grpc.aio.Channel
    folder: Path

    async def load(self, path: str, **how: Any) -> model_pb2.LoadedModel:
        stub: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        request = model_pb2.LoadModelRequest(path=path, **how)
        return [reply async for reply in stub.LoadModel(request)][-1].loaded

    async def say(
        self, prompt: tuple[int, ...], count: int, begun: asyncio.Event | None = None
    ) -> list[int]:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self.channel)
        request = GenerateRequest(
            max_tokens=count, ignore_eos=True, sampling=SamplingParams(temperature=0)
        )
        request.tokens.ids.extend(prompt)
        tokens: list[int] = []
        async for reply in stub.Generate(request):
            if begun is not None:
                begun.set()
            if reply.HasField("chunk"):
                tokens.append(reply.chunk.token_id)
        return tokens

    async def adapters(self) -> list[tuple[int, str, float]]:
        stub: Any = lora_pb2_grpc.LoraServiceStub(self.channel)
        listed = await stub.ListAdapters(lora_pb2.ListAdaptersRequest())
        return [(one.id, one.path, one.scale) for one in listed.adapters]

    async def num_compiled(self) -> int:
        stub: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        info = (await stub.GetServerInfo(model_pb2.GetServerInfoRequest())).info
        return info.counters.compiles

    async def served(self) -> str:
        stub: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        return Path((await stub.GetModel(model_pb2.GetModelRequest())).model.path).name


@asynccontextmanager
async def swapping(folder: Path, **config: Any) -> AsyncGenerator[Swapping]:
    for seed, name in enumerate((A, B), 1):
        write_llama(folder / name, TinyLlama(context=512, seed=seed))
    cached: Mapping[str, Any] = {"compile_cache": str(folder / "programs"), **config}
    options = options_for(
        folder / A, engine=replace(CONFIG, **cached), model_dir=str(folder), grpc_port=0
    )
    server = Server(options)
    await server.start()
    await server.load(lambda sink: load_named(options, sink))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Swapping(channel, folder)
    finally:
        await server.stop(5)
        gc.unfreeze()


@pytest.mark.slow
async def test_eight_streams_end_as_their_lone_runs(tmp_path: Path) -> None:
    """Beside the model that is loaded next, then before it."""
    async with swapping(tmp_path) as it:
        alone = [await it.say(prompt, 200) for prompt in PROMPTS]
        assert await _says_through_load(it, B, replace_first=False) == alone
        assert await it.served() == B
        other = [await it.say(prompt, 200) for prompt in PROMPTS]
        assert other != alone
        assert await _says_through_load(it, A, replace_first=True) == other
        assert [await it.say(prompt, 200) for prompt in PROMPTS] == alone


async def _says_through_load(it: Swapping, name: str, *, replace_first: bool) -> list[list[int]]:
    """What eight streams say that run when another model is asked for."""
    begun = [asyncio.Event() for _ in PROMPTS]
    streams = [
        asyncio.create_task(it.say(prompt, 200, event))
        for prompt, event in zip(PROMPTS, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    loaded = await it.load(name, replace_first=replace_first)
    assert loaded.plan.side_by_side is not replace_first
    return await asyncio.gather(*streams)


@pytest.mark.slow
async def test_files_that_cannot_be_served_leave_the_old_model(tmp_path: Path) -> None:
    adapter = write_adapter(
        tmp_path / "lora.gguf", TinyAdapter(rank=2), {ATTN_Q: (64, 64)}, (ATTN_Q,)
    )
    async with swapping(tmp_path, adapters=(StartAdapter(str(adapter), 0.5),)) as it:
        before = await it.adapters()
        whole = (tmp_path / B).read_bytes()
        (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "empty.gguf").write_bytes(b"")
        write_llama(tmp_path / "wide.gguf", TinyLlama(context=512, width=128))
        expected = {
            "cut.gguf": "MODEL_FILE_INVALID",
            "empty.gguf": "MODEL_FILE_INVALID",
            "lora.gguf": "MODEL_NOT_SUPPORTED",
            "wide.gguf": "ADAPTER_MISMATCH",
        }
        said = await it.say(PROMPTS[0], 20)
        for name, reason in expected.items():
            assert (await failure(it.load(name))).reason == reason, name
            assert (await it.served(), await it.say(PROMPTS[0], 20)) == (A, said)
        assert await it.adapters() == before
        await it.load(B)
        assert await it.adapters() == before
        # Other content under the same name is not what somebody loaded.
        write_adapter(adapter, TinyAdapter(rank=2, seed=9), {ATTN_Q: (64, 64)}, (ATTN_Q,))
        assert (await failure(it.load(A))).reason == "ADAPTER_FILE_INVALID"


@pytest.mark.slow
async def test_twenty_swaps_leave_memory_and_threads_flat(tmp_path: Path) -> None:
    async with swapping(tmp_path) as it:
        marks: list[tuple[int, int]] = []
        for number in range(20):
            await it.load((B, A)[number % 2], replace_first=number % 3 == 0)
            await it.say(PROMPTS[0], 5)
            marks.append((_resident_bytes(), threading.active_count()))
        first, last = marks[3], marks[-1]
        assert last[0] - first[0] < 24 << 20, marks
        assert last[1] <= first[1] + 1, marks


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_programs_of_a_model_that_is_loaded_beside_another_count_once(
    tmp_path: Path,
) -> None:
    async with swapping(tmp_path, num_slots=1) as it:
        first = await it.num_compiled()
        loaded = await it.load(A)
        assert loaded.plan.side_by_side
        # The same programs again: whoever counted them for both would have three times as many.
        assert first < await it.num_compiled() <= 2 * first
