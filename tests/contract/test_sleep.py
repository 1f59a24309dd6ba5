"""A server whose pools sleep when idle: who sees it, and who wakes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from kvarts.v1 import common_pb2, generation_pb2, model_pb2, slot_pb2, tokenization_pb2

from tests.contract.serving import CONFIG, Serving, serving
from tests.fakes import FakeClock
from tests.waiting import until

Call = Callable[[Serving], Awaitable[Any]]


async def _is_asleep(it: Serving) -> bool:
    return (await it.model.GetServerInfo(model_pb2.GetServerInfoRequest())).info.sleeping


async def _generate(it: Serving) -> Any:
    return await it.collect(generation_pb2.GenerateRequest(text="a", max_tokens=1))


async def _tokenize(it: Serving) -> Any:
    return await it.tokenization.Tokenize(tokenization_pb2.TokenizeRequest(text="a"))


async def _detokenize(it: Serving) -> Any:
    return await it.tokenization.Detokenize(tokenization_pb2.DetokenizeRequest(token_ids=[5]))


async def _render(it: Serving) -> Any:
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="a")])
    request = tokenization_pb2.ApplyChatTemplateRequest(chat=chat)
    return await it.tokenization.ApplyChatTemplate(request)


async def _erase(it: Serving) -> Any:
    return await it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=0))


async def _fall_asleep(it: Serving, clock: FakeClock) -> None:
    assert not await _is_asleep(it)
    clock.advance(1)
    await until(partial(_is_asleep, it), bool)


@pytest.mark.parametrize("call", [_generate, _tokenize, _detokenize, _render, _erase])
async def test_use_wakes_it_before_it_is_answered(call: Call) -> None:
    clock = FakeClock()
    async with serving(config=replace(CONFIG, sleep_idle_s=0.01), clock=clock) as it:
        await _fall_asleep(it, clock)
        await call(it)
        assert not await _is_asleep(it)
        assert it.is_clean()


async def test_looking_does_not_wake_it() -> None:
    clock = FakeClock()
    async with serving(config=replace(CONFIG, sleep_idle_s=0.01), clock=clock) as it:
        await _fall_asleep(it, clock)
        await it.model.GetModel(model_pb2.GetModelRequest())
        await it.model.GetMetrics(model_pb2.GetMetricsRequest())
        await it.slots.ListSlots(slot_pb2.ListSlotsRequest())
        assert await it.status() == 1
        assert await _is_asleep(it)
