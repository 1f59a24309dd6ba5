"""Calls that arrive while the model is changed in place: they wait, and each gets its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvarts.v1 import (
    embedding_pb2,
    tokenization_pb2,
)

from engine.errors import ModelFileError
from tests.contract.serving import (
    CONFIG,
    GenerateRequest,
    Serving,
    StepGate,
    failure,
    gated_runner,
)
from tests.contract.swaps import (
    IN_PLACE,
    LETTERS,
    NEW,
    OLD,
    A,
    B,
    LoadModelRequest,
    all_replies,
    make_loader,
    said,
    swapping,
    until_loading,
    until_unready,
)
from tests.contract.test_metrics import codes, scrape
from tests.loaders import FakeLoader
from tests.waiting import until, until_so

TOKENIZE = tokenization_pb2.TokenizeRequest(text="ab")
EMBED = embedding_pb2.EmbedRequest(inputs=[embedding_pb2.EmbedInput(text="ab")])


@pytest.fixture(name="loader")
def _loader(tmp_path: Path) -> FakeLoader:
    return make_loader(tmp_path)


@asynccontextmanager
async def draining(
    loader: FakeLoader, how: LoadModelRequest, **more: Any
) -> AsyncGenerator[tuple[Serving, asyncio.Task[str], asyncio.Task[list[Any]], StepGate]]:
    """A server that waits for a running request before it lets the old model go."""
    gate = StepGate()
    async with swapping(loader, runner=gated_runner(gate), **more) as it:
        running = asyncio.create_task(said(it, 20))
        await gate.arrival()
        changing = asyncio.create_task(all_replies(it, how))
        await until_unready(it)
        yield it, running, changing, gate


async def until_waiting(it: Serving, count: int) -> None:
    """Waits until so many calls wait for a model."""
    room = it.server.waiting_room
    await until_so(lambda: room.num_calls == count)


async def test_calls_that_arrive_during_a_change_wait_and_run_on_the_new_model(
    loader: FakeLoader,
) -> None:
    async with draining(loader, IN_PLACE) as (it, running, changing, gate):
        early = [asyncio.create_task(said(it)) for _ in range(3)]
        counting = asyncio.ensure_future(it.tokenization.Tokenize(TOKENIZE))
        embedding = asyncio.create_task(failure(it.embedding.Embed(EMBED)))
        await until_waiting(it, 5)
        loader.gate = threading.Event()
        gate.open()
        assert await running == LETTERS[A] * 20
        await until_loading(loader)
        late = asyncio.create_task(said(it))
        await until_waiting(it, 6)
        loader.gate.set()
        assert await asyncio.gather(*early, late) == [LETTERS[B] * 4] * 4
        assert len((await counting).tokens) == 2
        assert (await embedding).reason == "NOT_SUPPORTED"
        await changing
        await until_waiting(it, 0)
        counters = await scrape(it)
        assert counters['kvarts_generations_total{outcome="finished"}'] == 5
        # Their wait is a wait in the queue.
        assert counters["kvarts_queue_seconds_sum"] > 0


async def test_no_more_calls_wait_than_may_queue(loader: FakeLoader) -> None:
    config = replace(CONFIG, queue_requests=2)
    async with draining(loader, IN_PLACE, config=config) as (it, running, changing, gate):
        waiting = [asyncio.create_task(said(it)) for _ in range(2)]
        await until_waiting(it, 2)
        failed = await failure(it.collect(GenerateRequest(text="ab")))
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUEUE_FULL",
        )
        assert failed.retry_s is not None
        gate.open()
        await running
        await changing
        assert await asyncio.gather(*waiting) == [LETTERS[B] * 4] * 2


async def test_who_waits_for_a_model_may_give_up(loader: FakeLoader) -> None:
    async with draining(loader, IN_PLACE) as (it, running, changing, gate):
        late = asyncio.create_task(failure(it.collect(GenerateRequest(text="ab"), timeout=3)))
        await until_waiting(it, 1)
        assert (await late).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_waiting(it, 0)
        call = it.generation.Generate(GenerateRequest(text="ab"))
        await until_waiting(it, 1)
        call.cancel()
        await until_waiting(it, 0)
        gate.open()
        await running
        await changing
        wanted = {"OK": 1, "DEADLINE_EXCEEDED": 1, "CANCELLED": 1}
        await until(partial(scrape, it), lambda scraped: codes(scraped) == wanted)


async def test_who_waits_goes_on_on_the_old_model_if_it_stays(loader: FakeLoader) -> None:
    how = LoadModelRequest(path=NEW, replace_first=True)
    how.drain_timeout.FromMilliseconds(300)
    async with draining(loader, how) as (it, running, changing, gate):
        waiting = asyncio.create_task(said(it))
        await until_waiting(it, 1)
        assert (await failure(changing)).reason == "MODEL_IN_USE"
        gate.open()
        assert await asyncio.gather(running, waiting) == [LETTERS[A] * 20, LETTERS[A] * 4]


async def test_who_waits_is_told_when_nothing_comes(loader: FakeLoader) -> None:
    loader.fails = {("load", name): [ModelFileError(name, "is gone")] for name in (OLD, NEW)}
    async with draining(loader, IN_PLACE) as (it, running, changing, gate):
        waiting = asyncio.create_task(failure(it.collect(GenerateRequest(text="ab"))))
        await until_waiting(it, 1)
        gate.open()
        await running
        assert (await failure(changing)).reason == "MODEL_LOST"
        assert (await waiting).reason == "MODEL_LOADING"


async def test_a_stop_tells_who_waits_for_a_model(loader: FakeLoader) -> None:
    async with draining(loader, IN_PLACE, stop_s=1.0) as (it, running, changing, gate):
        waiting = asyncio.create_task(failure(it.collect(GenerateRequest(text="ab"))))
        await until_waiting(it, 1)
        stopping = asyncio.create_task(it.server.stop(1.0))
        assert (await waiting).reason == "SHUTTING_DOWN"
        gate.open()
        await stopping
        await asyncio.gather(running, changing, return_exceptions=True)
