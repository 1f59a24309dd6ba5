"""The default model, as `make serve` serves it, asked by the official clients."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from kvarts.v1 import generation_pb2
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from service.fetch.wheel_model import is_present
from tests.e2e.conftest import healthy
from tests.e2e.programs import running
from tests.e2e.rpc import Client, client

pytestmark = [pytest.mark.slow, pytest.mark.real]

QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
]


@pytest.fixture(scope="module")
async def doors() -> AsyncGenerator[tuple[AsyncOpenAI, Client]]:
    home = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(home) if home else Path.home() / ".cache") / "kvarts"
    if not is_present(cache):
        pytest.skip("needs SmolLM2: make setup fetches it")
    flags = ("--offline", "--cache-dir", str(cache), "--port", "0", "--grpc-port", "0")
    with running("kvarts-server", *flags) as program:
        url = program.ready().http_url()
        await healthy(url)
        api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        async with api, client(program.grpc_address()) as rpc:
            yield api, rpc


async def test_it_knows_the_capital_of_france(doors: tuple[AsyncOpenAI, Client]) -> None:
    api, rpc = doors
    whole = await api.chat.completions.create(
        model="any", messages=QUESTION, max_tokens=32, temperature=0
    )
    assert whole.choices[0].finish_reason == "stop"
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text

    stream = await api.chat.completions.create(
        model="any", messages=QUESTION, max_tokens=32, temperature=0, stream=True
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(parts) == text
    await rpc.idle()


async def test_it_completes_over_grpc(doors: tuple[AsyncOpenAI, Client]) -> None:
    _, rpc = doors
    request = generation_pb2.GenerateRequest(text="The capital of France is", max_tokens=3)
    request.sampling.temperature = 0
    responses = rpc.generation.Generate(request, metadata=rpc.metadata)
    text = "".join([response.chunk.text async for response in responses])
    assert text.startswith(" Paris")
    await rpc.idle()
