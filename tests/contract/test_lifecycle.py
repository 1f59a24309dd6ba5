"""How calls end early, and how a server starts and stops."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvarts.v1 import generation_pb2_grpc, model_pb2

from engine.requests import Request
from engine.scheduling.wishes import Save
from engine.types import EventSink
from service.loaded import LoadedModel
from service.server import READY_SERVICE, BindError, Server, serve
from tests.contract.serving import (
    CONFIG,
    GenerateRequest,
    Serving,
    StepGate,
    failure,
    fake_model,
    gated_runner,
    options,
    read_failure,
    serving,
)
from tests.fakes import FakeClock, fake_engine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LONG = GenerateRequest(text="a long one", ignore_eos=True, max_tokens=200)


async def settled(it: Serving) -> None:
    """Runs more requests: when one is done, every command before it was taken."""
    for _ in range(20):
        await it.collect(GenerateRequest(text="x", max_tokens=1))
        if it.is_clean():
            return
    raise AssertionError(f"something stayed behind: {it.engine.snapshot()}")


def assert_books_balance(it: Serving) -> None:
    """Every request that started has ended in exactly one way."""
    counters = it.engine.snapshot().counters
    ended = counters.requests_finished + counters.requests_failed + counters.requests_cancelled
    assert counters.requests_started == ended


async def test_a_cancel_takes_a_decoding_request_out_of_the_next_step() -> None:
    gate = StepGate()
    async with serving(runner=gated_runner(gate)) as it:
        other = asyncio.create_task(it.collect(replace_text(LONG, "other")))
        await gate.arrival()
        call = it.generation.Generate(LONG)
        await it.commanded("submit")
        await it.commanded("submit")
        gate.step()
        with_prompt = await gate.arrival()
        assert (len(with_prompt.decodes), with_prompt.chunk is not None) == (1, True)
        gate.step()
        assert len((await gate.arrival()).decodes) == 2
        assert await call.read() is not grpc.aio.EOF
        call.cancel()
        await it.commanded("cancel")
        gate.step()
        assert len((await gate.arrival()).decodes) == 1
        gate.open()
        await other
        await settled(it)


async def test_a_cancel_between_two_chunks_of_a_prompt() -> None:
    gate = StepGate()
    config = replace(CONFIG, chunk_tokens=16)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        call = it.generation.Generate(GenerateRequest(text="x" * 100))
        await gate.arrival()
        call.cancel()
        await it.commanded("cancel")
        gate.open()
        await settled(it)
        # Of the seven chunks only the one that ran already.
        assert sum(batch.chunk is not None for batch in gate.batches) == 1


async def test_a_cancel_of_a_request_that_waits() -> None:
    gate = StepGate()
    config = replace(CONFIG, num_slots=1)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(it.collect(GenerateRequest(text="x", max_tokens=2)))
        await gate.arrival()
        waiting = it.generation.Generate(LONG)
        await it.commanded("submit")
        await it.commanded("submit")
        waiting.cancel()
        await it.commanded("cancel")
        gate.open()
        assert await running
        await settled(it)
        assert it.engine.snapshot().counters.requests_cancelled == 1


async def test_a_dropped_connection_is_a_cancel() -> None:
    gate = StepGate()
    async with serving(runner=gated_runner(gate)) as it:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{it.server.port}")
        call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(LONG)
        await gate.arrival()
        await channel.close()
        await it.commanded("cancel")
        gate.open()
        await settled(it)
        assert call.cancelled()


async def test_an_expired_call_is_a_cancel() -> None:
    gate = StepGate()
    async with serving(runner=gated_runner(gate)) as it:
        failed = await failure(it.collect(LONG, timeout=0.2))
        assert failed.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await it.commanded("cancel")
        gate.open()
        await settled(it)


async def test_200_deadlines_of_0_to_50_ms_leave_nothing_behind() -> None:
    rng = random.Random(3)
    async with serving(clock=time.monotonic) as it:
        for _ in range(10):
            calls = [it.collect(LONG, timeout=rng.choice((0, 0.001, 0.05))) for _ in range(20)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            codes = {end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)}
            assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED}
        await settled(it)
        assert_books_balance(it)


async def test_300_cancels_at_random_points_leave_nothing_behind() -> None:
    rng = random.Random(7)

    async def one(it: Serving) -> None:
        call = it.generation.Generate(LONG)
        for _ in range(rng.randrange(4)):
            await call.read()
        call.cancel()

    async with serving() as it:
        for _ in range(10):
            await asyncio.gather(*(one(it) for _ in range(30)))
        await settled(it)
        assert_books_balance(it)


async def test_64_clients_on_8_slots_all_complete() -> None:
    config = replace(CONFIG, num_slots=8)
    async with serving(config=config) as it:
        alone = await it.collect(GenerateRequest(text="prompt 0", max_tokens=8))
        calls = [
            it.collect(GenerateRequest(text=f"prompt {i % 16}", max_tokens=8)) for i in range(64)
        ]
        answers = await asyncio.gather(*calls)
        assert all(answer[-1].HasField("finished") for answer in answers)
        texts = ["".join(r.chunk.text for r in answer) for answer in answers]
        assert texts[0] == texts[16] == "".join(r.chunk.text for r in alone)
        await settled(it)


async def test_256_clients_on_one_connection_are_served_in_turn_or_refused_with_a_hint() -> None:
    gate = StepGate()
    async with serving(config=replace(CONFIG, queue_requests=32), runner=gated_runner(gate)) as it:
        taken: list[tuple[int, ...]] = []
        submit = it.engine.submit

        def watched(request: Request, *, save: Save | None = None) -> None:
            submit(request, save=save)
            taken.append(request.prompt)

        it.engine.submit = watched
        asks = [
            GenerateRequest(text=f"{i:03d} asks", max_tokens=8, cache_prompt=False)
            for i in range(256)
        ]
        calls = [asyncio.create_task(_served(it, ask)) for ask in asks]
        # What waits is bounded, so the others are answered while the engine does not move.
        done: set[asyncio.Task[bool]] = set()
        while len(done) < 256 - CONFIG.num_slots - 32:
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert done
        assert not any(task.result() for task in done)
        gate.open()
        served = await asyncio.gather(*calls)
        assert sum(served) == len(taken) <= CONFIG.num_slots + 32
        prompts = [tuple(batch.chunk.tokens) for batch in gate.batches if batch.chunk is not None]
        assert prompts == taken
        await settled(it)


async def _served(it: Serving, request: GenerateRequest) -> bool:
    try:
        await it.collect(request)
    except grpc.aio.AioRpcError as error:
        refused = read_failure(error)
        if refused.reason != "QUEUE_FULL" or refused.retry_s is None:
            raise
        return False
    return True


async def test_a_reader_that_stalls_slows_nobody_and_is_given_up() -> None:
    # Log-probabilities make chunks large enough to fill the connection's window.
    config = replace(CONFIG, context_tokens=8192)
    stalled = GenerateRequest(text="x", ignore_eos=True, max_tokens=8000, top_logprobs=101)
    async with serving(config=config, stall_limit_s=0.2) as it:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{it.server.port}") as channel:
            call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(stalled)
            await call.read()
            assert await it.collect(GenerateRequest(text="y", max_tokens=5))
            await it.commanded("cancel")
            failed = await failure(_drain(call))
            assert failed.reason == "DEADLINE"
            assert failed.metadata == {"deadlineS": "0.2"}
        await settled(it)


async def _drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
    code = await call.code()
    if code != grpc.StatusCode.OK:
        raise grpc.aio.AioRpcError(
            code, trailing_metadata=await call.trailing_metadata(), details=await call.details()
        )


async def test_a_stop_finishes_what_runs_and_refuses_what_waits() -> None:
    gate = StepGate()
    config = replace(CONFIG, num_slots=1)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(it.collect(GenerateRequest(text="x", max_tokens=3)))
        await gate.arrival()
        waiting = asyncio.create_task(failure(it.collect(LONG)))
        await it.commanded("submit")
        await it.commanded("submit")
        watch = it.health.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(it.server.stop(10))
        assert (await watch.read()).status == NOT_SERVING
        late = await failure(it.model.GetModel(model_pb2.GetModelRequest()))
        gate.open()
        refused = await waiting
        answer = await running
        await stopping
    assert (late.code, late.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    assert refused.reason == "SHUTTING_DOWN"
    assert refused.retry_s is not None
    assert answer[-1].finished.completion_tokens == 3


async def test_a_stop_cuts_what_runs_too_long() -> None:
    gate = StepGate()
    # More steps than there can be between the gate's opening and the stop.
    config = replace(CONFIG, context_tokens=4096, num_slots=1)
    endless = GenerateRequest(text="a long one", ignore_eos=True, max_tokens=4000)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(failure(it.collect(endless)))
        await gate.arrival()
        watch = it.health.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(it.server.stop(0.5))
        assert (await watch.read()).status == NOT_SERVING
        gate.open()
        cut = await running
        await stopping
    assert (cut.code, cut.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


async def test_health_is_answered_while_the_model_loads() -> None:
    go = threading.Event()
    stop = asyncio.Event()

    def load(sink: EventSink) -> LoadedModel:
        assert go.wait(30)
        return fake_model(fake_engine(sink))

    server = Server(options())
    await server.start()
    loading = asyncio.create_task(server.load(load))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        assert (await watch.read()).status == NOT_SERVING
        alive = await stub.Check(health_pb2.HealthCheckRequest(service=""))
        assert alive.status == SERVING
        go.set()
        assert (await watch.read()).status == SERVING
        await loading
        await server.stop(1)
    assert not stop.is_set()


async def test_a_dead_engine_is_neither_ready_nor_alive() -> None:
    gate, clock = StepGate(), BreakableClock()
    async with serving(runner=gated_runner(gate), clock=clock) as it:
        watch = it.health.Watch(health_pb2.HealthCheckRequest(service=""))
        assert (await watch.read()).status == SERVING
        call = asyncio.create_task(failure(it.collect(LONG)))
        await gate.arrival()
        clock.is_broken = True
        gate.open()
        failed = await call
        clock.is_broken = False
        assert failed.reason == "ENGINE_FAULT"
        assert (await watch.read()).status == NOT_SERVING
        assert await it.status() == NOT_SERVING
        again = await failure(it.collect(LONG))
        assert again.reason == "ENGINE_FAULT"


class BreakableClock(FakeClock):
    """What a bug of the engine's own looks like: not the device's, so nobody forgives it."""

    is_broken = False

    def __call__(self) -> float:
        if self.is_broken:
            raise ValueError("a bug")
        return super().__call__()


async def test_serve_runs_until_it_is_told_to_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvarts.service")
    socket = tmp_path / "s.sock"
    stop = asyncio.Event()
    served = asyncio.create_task(
        serve(
            options(grpc_port=None, private_socket=str(socket)),
            stop,
            lambda sink: fake_model(fake_engine(sink)),
        )
    )
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=READY_SERVICE)
        watch = stub.Watch(request, wait_for_ready=True)
        while (await watch.read()).status != SERVING:
            pass
        stop.set()
        assert await served == 0
    assert caplog.records[-1].message == "stopped"


async def test_serve_stops_during_a_load_without_waiting_for_it() -> None:
    go, begun = threading.Event(), threading.Event()

    def load(sink: EventSink) -> LoadedModel:
        begun.set()
        go.wait(30)
        return fake_model(fake_engine(sink))

    stop = asyncio.Event()
    served = asyncio.create_task(serve(options(), stop, load))
    await asyncio.to_thread(begun.wait, 30)
    stop.set()
    assert await served == 0
    go.set()


async def test_serve_reports_a_model_that_cannot_be_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load(sink: EventSink) -> LoadedModel:
        raise OSError("no such model")

    with caplog.at_level(logging.INFO):
        assert await serve(options(), asyncio.Event(), load) == 1
    # The last that is said is why.
    assert "cannot load the model" in caplog.records[-1].message


async def test_a_second_server_on_the_same_port_is_refused_by_name() -> None:
    async with serving() as it:
        port = it.server.port
        second = Server(options(grpc_port=port))
        words = rf"127.0.0.1:{port}: Address already in use \(see --grpc-port\)"
        with pytest.raises(BindError, match=words):
            await second.start()
        await second.stop(0)
        assert await serve(options(grpc_port=port), asyncio.Event()) == 1


def replace_text(request: GenerateRequest, text: str) -> GenerateRequest:
    changed = GenerateRequest()
    changed.CopyFrom(request)
    changed.text = text
    return changed
