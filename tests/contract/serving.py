"""A real gRPC server over the real engine on a fake runner, and a client channel to it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from kvarts.v1 import (
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    lora_pb2_grpc,
    model_pb2_grpc,
    rebuild_pb2_grpc,
    slot_pb2_grpc,
    tokenization_pb2_grpc,
)

from engine.engine import Engine
from engine.errors import TemplateError
from engine.memory.planner import plan_memory
from engine.step import StepBatch
from engine.types import EngineConfig, EventSink
from service.defaults import GenerationDefaults
from service.loaded import LoadedModel, ModelFacts, ModelNames
from service.model_loader import ModelLoader
from service.options import ModelSource, ServiceOptions
from service.server import READY_SERVICE, Server
from service.telemetry import Spans
from tests.fake_runner import FakeRunner
from tests.fake_text import FakeTokenizer
from tests.fakes import fake_engine, fake_shape, fitting_runner
from tests.slot_stores import fake_store

GenerateRequest = generation_pb2.GenerateRequest
GenerateResponse = generation_pb2.GenerateResponse
SamplingParams = generation_pb2.SamplingParams

CONFIG = EngineConfig(context_tokens=256, num_slots=4, page_tokens=16)
FACTS = ModelFacts(
    architecture="fake",
    vocab_type=1,
    context_train_tokens=1024,
    embedding_size=8,
    num_layers=2,
    num_params=1000,
    size_bytes=4000,
    name="Fake",
    ftype="all F32",
    special_tokens={"bos": (0, "<s>"), "eos": (1, "</s>")},
    chat_template="{fake}",
)


class FakeTemplate:
    """Renders `role:content|` per message, and what else it was given in brackets."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        if any(message["content"] == "boom" for message in messages):
            raise TemplateError("it said boom")
        turns = "".join(f"{m['role']}:{m['content']}|" for m in messages)
        shown = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        named = "".join(f"[{key}={value}]" for key, value in sorted((extra or {}).items()))
        return shown + named + turns + ("assistant:" if add_generation_prompt else "")


def options(**changes: Any) -> ServiceOptions:
    """Options of a server on a free port; no file is ever read."""
    source = ModelSource(
        path="fake.gguf",
        hf_repo=None,
        hf_file=None,
        is_offline=True,
        cache_dir=Path("unused"),
        hub_dir=Path("unused"),
    )
    return replace(ServiceOptions(model=source, engine=CONFIG, grpc_port=0), **changes)


def fake_model(engine: Engine, **changes: Any) -> LoadedModel:
    """What the loader would hand over."""
    model = LoadedModel(
        engine=engine,
        tokenizer=FakeTokenizer(),
        template=FakeTemplate(),
        names=ModelNames(model_id="fake", path="fake.gguf"),
        facts=FACTS,
        defaults=GenerationDefaults(),
    )
    return replace(model, **changes)


@dataclass
class Serving:
    """A server that is ready, its engine, and stubs on a channel to it.

    The names of the engine's commands arrive in `commands` as the service gives them.
    """

    server: Server
    engine: Engine
    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.commands: asyncio.Queue[str] = asyncio.Queue()
        for name in ("submit", "cancel", "erase_slot", "transfer_slot"):
            self._watch(name)
        channel = self.channel
        self.generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self.tokenization: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        self.embedding: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.model: Any = model_pb2_grpc.ModelServiceStub(channel)
        self.slots: Any = slot_pb2_grpc.SlotServiceStub(channel)
        self.lora: Any = lora_pb2_grpc.LoraServiceStub(channel)
        self.rebuild: Any = rebuild_pb2_grpc.RebuildServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def _watch(self, name: str) -> None:
        command = getattr(self.engine, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = command(*args, **kwargs)
            self.commands.put_nowait(name)
            return result

        setattr(self.engine, name, watched)

    async def commanded(self, name: str) -> None:
        """Waits until the service has given the engine this command once more."""
        async with asyncio.timeout(30):
            while await self.commands.get() != name:
                pass

    def is_clean(self) -> bool:
        """Whether nothing runs or waits and every page is free or kept."""
        snapshot = self.engine.snapshot()
        self.engine.check_integrity()
        pools = [pool.free + pool.pinned + pool.cached == pool.size for pool in snapshot.pools]
        return snapshot.running == snapshot.queued == 0 and all(pools)

    async def collect(self, request: GenerateRequest, **call: Any) -> list[GenerateResponse]:
        """Runs a generation to its end."""
        return [response async for response in self.generation.Generate(request, **call)]

    async def raw(self, path: str, data: bytes) -> bytes:
        """Sends bytes to a path."""
        return await cast("Any", self.channel).unary_unary(path)(data)

    async def reflect(self, path: str, metadata: Sequence[tuple[str, str]] = ()) -> bytes:
        """Asks reflection for the list of services; returns the reply's bytes."""
        listing = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()
        call = self._reflection(path, metadata)
        await call.write(listing)
        await call.done_writing()
        reply = await call.read()
        assert await call.read() is grpc.aio.EOF
        return reply

    async def refused_reflection(self, path: str) -> None:
        """Waits for the refusal of a call without a key, which asks nothing.

        grpc.aio loses why a call was refused whose own question is still being written.
        """
        await self._reflection(path, ()).read()

    def _reflection(self, path: str, metadata: Sequence[tuple[str, str]]) -> Any:
        return cast("Any", self.channel).stream_stream(path)(metadata=tuple(metadata))

    async def status(self, service: str = READY_SERVICE) -> int:
        """Asks health."""
        request = health_pb2.HealthCheckRequest(service=service)
        return (await self.health.Check(request)).status


@asynccontextmanager
async def serving(
    *,
    config: EngineConfig = CONFIG,
    runner: FakeRunner | None = None,
    clock: Callable[[], float] | None = None,
    window: int | None = None,
    model: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    parts: Mapping[str, Any] | None = None,
    stall_limit_s: float = 30.0,
    group_patience_s: float = 30.0,
    stop_s: float = 5.0,
    num_adapters: int = 0,
    spans: Spans | None = None,
    make_loader: Callable[[], ModelLoader] | None = None,
    channel_options: Sequence[tuple[str, int]] = (),
    **changes: Any,
) -> AsyncGenerator[Serving]:
    """Starts a server, loads the fake model, and stops both; `parts` are the engine's."""
    told = options(engine=config, **changes)
    server = Server(
        told,
        stall_limit_s=stall_limit_s,
        group_patience_s=group_patience_s,
        spans=spans,
        make_loader=make_loader,
    )
    await server.start()
    engines: list[Engine] = []
    plan = plan_memory(config, fake_shape(window), 1 << 20)
    root = Path(told.slot_save_path) if told.slot_save_path else None

    def load(sink: EventSink) -> LoadedModel:
        device = runner or fitting_runner(plan)
        engine = fake_engine(
            sink,
            config=config,
            runner=device,
            clock=clock,
            window=window,
            num_adapters=num_adapters,
            **(parts or {}),
        )
        engines.append(engine)
        store = None
        if root is not None:
            store = fake_store(
                root, device, plan, lambda: engine.snapshot().adapters, **(identity or {})
            )
        return fake_model(engines[0], **({"slot_store": store} | dict(model or {})))

    await server.load(load)
    target = f"127.0.0.1:{server.port}"
    try:
        async with grpc.aio.insecure_channel(target, options=channel_options) as channel:
            yield Serving(server, engines[0], channel)
    finally:
        await server.stop(stop_s)


@dataclass(frozen=True)
class Failure:
    """What a failed call tells: its code, the ErrorInfo, faults of fields, the retry hint."""

    code: grpc.StatusCode
    text: str
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    retry_s: float | None
    size: int


async def failure(call: Awaitable[Any]) -> Failure:
    """Awaits a call that must fail."""
    try:
        result = await call
    except grpc.aio.AioRpcError as error:
        return read_failure(error)
    raise AssertionError(f"the call went well: {result}")


def read_failure(error: grpc.aio.AioRpcError) -> Failure:
    """Decodes the details of a failed call."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            status.ParseFromString(value)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    kinds = [detail.TypeName() for detail in status.details]
    assert len(set(kinds)) == len(kinds), kinds
    for detail in status.details:
        for message in (info, bad, retry):
            detail.Unpack(message)
    assert not status.details or info.domain == "kvarts.v1"
    return Failure(
        code=error.code(),
        text=error.details() or "",
        reason=info.reason,
        metadata=dict(info.metadata),
        fields=[violation.field for violation in bad.field_violations],
        retry_s=retry.retry_delay.ToTimedelta().total_seconds()
        if "google.rpc.RetryInfo" in kinds
        else None,
        size=status.ByteSize(),
    )


class StepGate:
    """Stops the engine thread before each step until the test lets it go on.

    Install as `FakeRunner.on_run`. `open` lets everything through from then on.
    """

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.batches: list[StepBatch] = []
        self._arrived: queue.Queue[StepBatch] = queue.Queue()

    def __call__(self, batch: StepBatch) -> None:
        self.batches.append(batch)
        self._arrived.put(batch)
        if not self._is_open:
            assert self._permits.acquire(timeout=30), "the test forgot to let a step go"

    async def arrival(self) -> StepBatch:
        """Waits until the engine thread is at the gate."""
        return await asyncio.to_thread(self._arrived.get, timeout=30)

    def step(self) -> None:
        """Lets one step through."""
        self._permits.release()

    def open(self) -> None:
        """Lets all further steps through."""
        self._is_open = True
        self._permits.release()


def gated_runner(gate: StepGate, **changes: Any) -> FakeRunner:
    """A runner behind a gate, with pages to spare."""
    return FakeRunner(num_pages=256, page_tokens=16, on_run=gate, **changes)
