"""A stream says what one answer says: the gateway and the service over a model from a file.

A few of the requests of which whole processes answer five hundred (`tests.e2e.test_streams`).
"""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator

import httpx
import pytest

from engine.types import EngineConfig
from service.loader import load_named
from service.server import Server
from tests.contract.test_loaded_model import options_for
from tests.e2e.conftest import CALL_TOKEN, TOOL_TEMPLATE
from tests.ggufs import TinyLlama, write_llama
from tests.streams.compare import Reached, compare
from tests.unit.gateway.conftest import serving

_REQUESTS = 20


@pytest.fixture(scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[httpx.AsyncClient]:
    folder = tmp_path_factory.mktemp("model")
    model = TinyLlama(context=512, num_layers=1, tokenizer="tools")
    path = write_llama(folder / "tools.gguf", model)
    options = options_for(
        path,
        engine=EngineConfig(context_tokens=1024, num_slots=2, chunk_tokens=64),
        chat_template=TOOL_TEMPLATE,
    )
    server = Server(options)
    await server.start()
    await server.load(lambda sink: load_named(options, sink))
    async with serving(f"127.0.0.1:{server.port}") as client:
        yield client
    await server.stop(5)
    gc.unfreeze()


async def test_a_stream_says_what_one_answer_says(http: httpx.AsyncClient) -> None:
    reached = Reached()
    for seed in range(_REQUESTS):
        await compare(http, seed, CALL_TOKEN, reached)
    # Every kind was tried.
    assert len(reached.counts) == len(+reached.counts) == 11, reached.counts
