"""Half of the callers stop reading: the others finish, and who has stopped is given up.

What waits for a reader is at most its own answer, whose tokens its request bounds.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from kvarts.v1 import generation_pb2_grpc

from engine.step import StepBatch
from tests.contract.serving import CONFIG, GenerateRequest, Serving, failure, serving
from tests.contract.test_lifecycle import assert_books_balance, settled
from tests.fake_runner import FakeRunner

# A single one is met in every run: `test_lifecycle`.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_READERS = 16
_STALLED = 16
# A reader that only waits for its turn of a busy machine is none that has stopped.
_LIMIT_S = 30
_TOKENS = 2000
_CONFIG = replace(
    CONFIG, num_slots=_READERS + _STALLED, context_tokens=(_READERS + _STALLED) * 4096
)
# Log-probabilities make answers large enough to fill every window and buffer on their way.
_TOP = 100


async def _stalled_call(stack: AsyncExitStack, port: int) -> Any:
    """Begins a call on a connection of its own, reads once, and no more."""
    # With a window that stays as small as it begins.
    own = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1 << 16),
    )
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own)
    stub: Any = generation_pb2_grpc.GenerationServiceStub(await stack.enter_async_context(channel))
    request = GenerateRequest(text="x", ignore_eos=True, max_tokens=_TOKENS, top_logprobs=_TOP)
    call = stub.Generate(request)
    await call.read()
    return call


async def _rest_of(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
    raise grpc.aio.AioRpcError(
        await call.code(),
        trailing_metadata=await call.trailing_metadata(),
        details=await call.details(),
        initial_metadata=await call.initial_metadata(),
    )


class _Hold:
    """Keeps the engine in a step, once every window is full, until it is let go.

    A fast machine would be through with all answers before anybody is given up.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self.let_go = threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        self._num_steps += 1
        if self._num_steps >= _TOKENS - 100:
            assert self.let_go.wait(300)


async def _cancels(it: Serving, count: int) -> None:
    """Waits until so many calls were given up."""
    async with asyncio.timeout(240):
        while count:
            count -= await it.commands.get() == "cancel"


async def test_16_of_32_calls_stop_reading() -> None:
    hold = _Hold()
    pages = _CONFIG.context_tokens // _CONFIG.page_tokens
    runner = FakeRunner(pages, _CONFIG.page_tokens, on_run=hold)
    async with (
        serving(config=_CONFIG, stall_limit_s=_LIMIT_S, runner=runner) as it,
        AsyncExitStack() as stack,
    ):
        stack.callback(hold.let_go.set)
        port = it.server.port
        assert port is not None
        stalled = await asyncio.gather(*(_stalled_call(stack, port) for _ in range(_STALLED)))
        reading = GenerateRequest(text="y", ignore_eos=True, max_tokens=50)
        answers = await asyncio.gather(*(it.collect(reading) for _ in range(_READERS)))
        assert [answer[-1].finished.completion_tokens for answer in answers] == [50] * _READERS
        await _cancels(it, _STALLED)
        hold.let_go.set()
        await _counted(it, started=_STALLED + _READERS, cancelled=_STALLED)
        failures = await asyncio.gather(*(failure(_rest_of(call)) for call in stalled))
        assert {failed.reason for failed in failures} == {"DEADLINE"}
        assert {failed.metadata["deadlineS"] for failed in failures} == {"30"}
        await _given_up(it)


async def _counted(it: Serving, *, started: int, cancelled: int = 0) -> None:
    """Waits until so many requests have begun, and so many were given up."""
    async with asyncio.timeout(240):
        while True:
            counters = it.engine.snapshot().counters
            if counters.requests_started >= started and counters.requests_cancelled >= cancelled:
                return
            await asyncio.sleep(0.05)


async def _given_up(it: Serving) -> None:
    await settled(it)
    assert_books_balance(it)
    assert it.engine.snapshot().counters.requests_cancelled == _STALLED
