"""HTTP requests that arrive while the model is changed in place wait as calls do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.errors import ModelFileError
from gateway.connection import Connection
from gateway.model_change import ModelChange
from service.swap_errors import ModelInUse
from service.tenure import Tenure
from tests.contract.serving import StepGate, failure, gated_runner
from tests.contract.swaps import (
    IN_PLACE,
    LETTERS,
    NEW,
    OLD,
    A,
    B,
    all_replies,
    make_loader,
    said,
    swapping,
)
from tests.loaders import FakeLoader
from tests.unit.gateway.conftest import serving, until_changing, until_ready

BODY = {"prompt": "ab", "n_predict": 4, "temperature": 0}


@pytest.fixture(name="loader")
def _loader(tmp_path: Path) -> FakeLoader:
    return make_loader(tmp_path)


@dataclass(frozen=True)
class Changing:
    """A gateway before a service that waits for a running request to let its old model go."""

    http: httpx.AsyncClient
    held: asyncio.Semaphore
    running: asyncio.Task[str]
    changing: asyncio.Task[list[Any]]
    gate: StepGate

    async def hold(self, path: str = "/completion", **more: Any) -> asyncio.Task[httpx.Response]:
        """A request that the gateway holds back when this returns."""
        task = asyncio.create_task(self.http.post(path, json=BODY | more))
        await self.held.acquire()
        return task


@asynccontextmanager
async def draining(loader: FakeLoader, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Changing]:
    held, wait = asyncio.Semaphore(0), ModelChange.wait

    async def noted(self: ModelChange, connection: Connection) -> None:
        held.release()
        await wait(self, connection)

    monkeypatch.setattr(ModelChange, "wait", noted)
    gate = StepGate()
    async with (
        asyncio.timeout(60),
        swapping(loader, runner=gated_runner(gate)) as it,
        serving(f"127.0.0.1:{it.server.port}") as http,
    ):
        running = asyncio.create_task(said(it, 20))
        await gate.arrival()
        changing = asyncio.create_task(all_replies(it, IN_PLACE))
        await until_changing(http)
        yield Changing(http, held, running, changing, gate)


async def test_requests_wait_and_run_on_the_new_model(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
):
    async with draining(loader, monkeypatch) as it:
        assert (await it.http.get("/health")).status_code == 503
        early = [await it.hold() for _ in range(3)]
        streaming = await it.hold("/v1/completions", stream=True)
        counting = await it.hold("/tokenize", content="ab")
        refused = await it.http.get("/slots")
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "Loading model")
        assert not any(task.done() for task in (*early, streaming, counting))
        it.gate.open()
        assert await it.running == LETTERS[A] * 20
        await it.changing
        for task in early:
            assert (await task).json()["content"] == LETTERS[B] * 4
        assert (await streaming).text.rstrip().endswith("data: [DONE]")
        assert len((await counting).json()["tokens"]) == 2
        assert (await it.http.get("/v1/models")).json()["data"][0]["id"] == NEW
        await until_ready(it.http)


async def test_requests_go_on_on_the_old_model_if_it_stays(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
):
    is_late = asyncio.Event()

    async def drained(old: Tenure, drain_s: float | None) -> None:
        del drain_s
        await is_late.wait()
        raise ModelInUse(old.num_users)

    monkeypatch.setattr("service.swap._drained", drained)
    async with draining(loader, monkeypatch) as it:
        waiting = await it.hold()
        is_late.set()
        assert (await failure(it.changing)).reason == "MODEL_IN_USE"
        it.gate.open()
        assert await it.running == LETTERS[A] * 20
        assert (await waiting).json()["content"] == LETTERS[A] * 4
        await until_ready(it.http)


async def test_requests_are_told_when_nothing_comes(
    loader: FakeLoader, monkeypatch: pytest.MonkeyPatch
):
    loader.fails = {("load", name): [ModelFileError(name, "is gone")] for name in (OLD, NEW)}
    async with draining(loader, monkeypatch) as it:
        waiting = await it.hold()
        it.gate.open()
        await it.running
        assert (await failure(it.changing)).reason == "MODEL_LOST"
        told = await waiting
        assert (told.status_code, told.json()["error"]["message"]) == (503, "Loading model")
        assert (await it.http.post("/completion", json=BODY)).status_code == 503
