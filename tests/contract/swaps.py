"""A server that changes its model, and what tests of that ask of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvarts.v1 import model_pb2

from service.loaded import ModelNames
from tests.contract.serving import (
    GenerateRequest,
    Serving,
    StepGate,
    failure,
    gated_runner,
    serving,
)
from tests.fake_text import FakeTokenizer
from tests.loaders import FakeLoader
from tests.waiting import until, until_so

LoadModelRequest = model_pb2.LoadModelRequest
OLD, NEW = "old.gguf", "new.gguf"
A, B = 40, 50
LETTERS = {token: FakeTokenizer().piece(token).decode() for token in (A, B)}
IN_PLACE = LoadModelRequest(path=NEW, replace_first=True)


def make_loader(tmp_path: Path) -> FakeLoader:
    folder = tmp_path / "models"
    folder.mkdir()
    loader = FakeLoader(folder)
    loader.write(OLD, A)
    loader.write(NEW, B)
    return loader


@asynccontextmanager
async def swapping(
    loader: FakeLoader, *, model: Mapping[str, Any] | None = None, **more: Any
) -> AsyncGenerator[Serving]:
    """A server that serves the old model, whose every token is A; `model` is what else it has."""
    names = ModelNames(model_id=OLD, path=str(loader.folder / OLD))
    runner = more.pop("runner", None) or gated_runner(_open_gate())
    runner.next_token = lambda history: A
    async with serving(
        model={"names": names, "close": lambda: loader.closed.append(OLD), **(model or {})},
        runner=runner,
        make_loader=lambda: loader,
        model_dir=str(loader.folder),
        num_adapters=loader.num_adapters,
        metrics_port=0,
        **more,
    ) as it:
        yield it


def _open_gate() -> StepGate:
    gate = StepGate()
    gate.open()
    return gate


async def load(it: Serving, path: str = NEW, **how: Any) -> model_pb2.LoadedModel:
    replies = [reply async for reply in it.model.LoadModel(LoadModelRequest(path=path, **how))]
    assert all(reply.HasField("progress") for reply in replies[:-1])
    return replies[-1].loaded


async def refused(it: Serving, path: str = NEW, **how: Any) -> Any:
    return await failure(load(it, path, **how))


async def said(it: Serving, count: int = 4) -> str:
    replies = await it.collect(GenerateRequest(text="ab", max_tokens=count))
    return "".join(reply.chunk.text for reply in replies)


async def served(it: Serving) -> str:
    return (await it.model.GetModel(model_pb2.GetModelRequest())).model.id


async def retired(loader: FakeLoader, *names: str) -> None:
    """Waits until models were let go and their memory was given back."""
    await until_so(lambda: loader.closed == list(names) and loader.num_released >= len(names))


async def all_replies(it: Serving, request: LoadModelRequest) -> list[Any]:
    return [reply async for reply in it.model.LoadModel(request)]


async def until_loading(loader: FakeLoader) -> None:
    await until_so(lambda: bool(loader.orders))


async def until_unready(it: Serving) -> None:
    await until(it.status, lambda status: status != 1)
