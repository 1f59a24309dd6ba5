"""The service over a model that the loader has read from a file: nothing here is a fake."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from gguf import GGUFWriter
from kvarts.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenization_pb2_grpc,
)
from kvarts.v1.tokenization_pb2 import ApplyChatTemplateRequest

from engine.types import EngineConfig
from service.loader import load_named
from service.options import ModelSource, ServiceOptions
from service.server import Server
from tests.contract.serving import GenerateRequest, GenerateResponse, SamplingParams
from tests.ggufs import (
    TinyLlama,
    add_llama_keys,
    add_tokenizer,
    close,
    encode,
    llama_tensors,
    spm_tokenizer,
)

NUM_SLOTS = 3


def write_model(path: Path) -> Path:
    """A tiny llama whose file has its own opinion on sampling."""
    model, tokenizer = TinyLlama(context=64, num_layers=1), spm_tokenizer()
    writer = GGUFWriter(path, "llama")
    add_llama_keys(writer, model)
    add_tokenizer(writer, tokenizer)
    writer.add_sampling_sequence("top_k;temperature")
    writer.add_sampling_top_k(20)
    writer.add_sampling_temp(0.6)
    for name, (values, ggml_type) in llama_tensors(model, tokenizer).items():
        writer.add_tensor(name, encode(values, ggml_type), raw_dtype=ggml_type)
    close(writer)
    return path


def options_for(path: Path, **changes: Any) -> ServiceOptions:
    source = ModelSource(
        path=str(path),
        hf_repo=None,
        hf_file=None,
        is_offline=True,
        cache_dir=path.parent,
        hub_dir=path.parent,
    )
    options = ServiceOptions(
        model=source,
        engine=EngineConfig(context_tokens=64, num_slots=NUM_SLOTS, chunk_tokens=32),
        grpc_port=0,
    )
    return replace(options, **changes)


@pytest.fixture(scope="module")
async def channel(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[grpc.aio.Channel]:
    path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    options = options_for(path, sampling_given=frozenset({"top_k"}))
    server = Server(options)
    await server.start()
    await server.load(lambda sink: load_named(options, sink))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop(5)
    gc.unfreeze()


async def collect(channel: grpc.aio.Channel, request: GenerateRequest) -> list[GenerateResponse]:
    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    return [response async for response in stub.Generate(request)]


def tokens(responses: list[GenerateResponse], index: int) -> list[int]:
    chunks = [r.chunk for r in responses if r.HasField("chunk")]
    return [chunk.token_id for chunk in chunks if chunk.index == index]


async def test_a_loaded_model_is_not_searched_for_garbage(channel: grpc.aio.Channel) -> None:
    del channel
    assert gc.get_freeze_count() > 1000


async def test_the_file_speaks_where_flags_are_silent(channel: grpc.aio.Channel) -> None:
    stub: Any = model_pb2_grpc.ModelServiceStub(channel)
    info = (await stub.GetServerInfo(model_pb2.GetServerInfoRequest())).info
    sampling = info.defaults.sampling
    assert sampling.temperature == pytest.approx(0.6)
    # A flag set this one.
    assert sampling.top_k == 40
    assert list(sampling.samplers.samplers) == [
        generation_pb2.SAMPLER_TOP_K,
        generation_pb2.SAMPLER_TEMPERATURE,
    ]


async def test_without_jinja_the_named_format_is_what_chats_are_written_in(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    options = options_for(path, chat_template="llama3", use_jinja=False)
    server = Server(options)
    await server.start()
    await server.load(lambda sink: load_named(options, sink))
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content=" hi ")])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        about: Any = model_pb2_grpc.ModelServiceStub(channel)
        texts: Any = tokenization_pb2_grpc.TokenizationServiceStub(channel)
        info = (await about.GetServerInfo(model_pb2.GetServerInfoRequest())).info
        model = (await about.GetModel(model_pb2.GetModelRequest())).model
        rendered = await texts.ApplyChatTemplate(ApplyChatTemplateRequest(chat=chat))
    await server.stop(5)
    assert not info.features.jinja
    assert model.chat_template.source == "llama3"
    assert rendered.prompt == (
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


async def test_ids_are_held_to_the_vocabulary_that_the_model_tells(
    channel: grpc.aio.Channel,
) -> None:
    about: Any = model_pb2_grpc.ModelServiceStub(channel)
    generation: Any = generation_pb2_grpc.GenerationServiceStub(channel)
    vocabulary = (await about.GetModel(model_pb2.GetModelRequest())).model.vocabulary
    assert len(bytes.fromhex(vocabulary)) == 32
    request = GenerateRequest(tokens=common_pb2.TokenIds(ids=[1, 5]), max_tokens=1)
    request.vocabulary = vocabulary
    assert [reply async for reply in generation.Generate(request)]
    request.vocabulary = "0" * 64
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(generation.Generate(request)))
    assert refused.value.code() is grpc.StatusCode.ABORTED


async def test_each_sample_is_what_a_request_of_its_own_seed_would_be(
    channel: grpc.aio.Channel,
) -> None:
    def ask(seed: int, num_samples: int = 1) -> GenerateRequest:
        return GenerateRequest(
            text="the day",
            max_tokens=8,
            num_samples=num_samples,
            cache_prompt=False,
            sampling=SamplingParams(seed=seed, temperature=2.0),
        )

    together = await collect(channel, ask(7, NUM_SLOTS))
    alone = [await collect(channel, ask(7 + i)) for i in range(NUM_SLOTS)]
    samples = [tokens(together, i) for i in range(NUM_SLOTS)]
    assert samples == [tokens(answer, 0) for answer in alone]
    assert len({tuple(sample) for sample in samples}) == NUM_SLOTS
    started = {r.started.index: r.started for r in together if r.HasField("started")}
    assert [started[i].seed for i in range(NUM_SLOTS)] == [7, 8, 9]
    # Each slot reads the prompt for itself.
    assert [started[i].cached_tokens for i in range(NUM_SLOTS)] == [0, 0, 0]
    finished = {r.finished.index: r.finished for r in together if r.HasField("finished")}
    assert [finished[i].completion_tokens for i in range(NUM_SLOTS)] == [8, 8, 8]
