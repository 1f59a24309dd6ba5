"""Every row of the error table that this build can reach, as a client sees it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest
from kvarts.v1 import (
    common_pb2,
    embedding_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
    tokenization_pb2,
)

from service.server import Server
from tests.contract.serving import (
    CONFIG,
    GenerateRequest,
    SamplingParams,
    StepGate,
    failure,
    gated_runner,
    options,
    serving,
)
from tests.fake_runner import FakeRunner
from tests.fake_text import FakeTokenizer
from tests.fakes import FakeClock

Code = grpc.StatusCode


def tokens(*ids: int) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=ids)


async def test_one_bad_field() -> None:
    async with serving() as it:
        failed = await failure(
            it.collect(GenerateRequest(text="x", sampling=SamplingParams(top_p=1.5)))
        )
    assert (failed.code, failed.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failed.fields == ["sampling.top_p"]
    assert failed.metadata == {
        "field": "sampling.top_p",
        "description": "1.5 is not between 0 and 1",
    }
    assert failed.retry_s is None


async def test_several_bad_fields_are_told_at_once() -> None:
    request = GenerateRequest(
        request_id="a b", sampling=SamplingParams(temperature=-1, min_p=float("nan")), n_keep=-2
    )
    async with serving() as it:
        failed = await failure(it.collect(request))
    assert sorted(failed.fields) == [
        "n_keep",
        "prompt",
        "request_id",
        "sampling.min_p",
        "sampling.temperature",
    ]
    assert all(field in failed.text for field in failed.fields)


async def test_a_thousand_bad_fields_still_fit_in_the_trailers() -> None:
    bias = dict.fromkeys(range(99), float("nan"))
    request = GenerateRequest(
        text="x", stop=["s" * 9000] * 256, sampling=SamplingParams(logit_bias=bias)
    )
    async with serving() as it:
        failed = await failure(it.collect(request))
    assert failed.reason == "INVALID_FIELD"
    assert failed.fields
    assert failed.size <= 6 * 1024


async def test_no_key_and_an_unknown_key() -> None:
    async with serving(api_keys=("good",)) as it:
        for header in ((), (("authorization", "Bearer bad"),), (("authorization", "good"),)):
            failed = await failure(it.model.GetModel(model_pb2.GetModelRequest(), metadata=header))
            assert (failed.code, failed.reason) == (Code.UNAUTHENTICATED, "BAD_API_KEY")
            assert failed.metadata == {}
        header = (("authorization", "Bearer good"),)
        assert (await it.model.GetModel(model_pb2.GetModelRequest(), metadata=header)).model


async def test_a_user_key_does_not_open_admin_calls() -> None:
    header = (("authorization", "Bearer user"),)
    request = slot_pb2.EraseSlotRequest(slot_id=0)
    async with serving(api_keys=("user",), admin_key="root") as it:
        failed = await failure(it.slots.EraseSlot(request, metadata=header))
        admin = (("authorization", "Bearer root"),)
        assert (await it.slots.EraseSlot(request, metadata=admin)).slot_id == 0
    assert (failed.code, failed.reason) == (Code.PERMISSION_DENIED, "ADMIN_ONLY")


async def test_while_the_model_loads() -> None:
    server = Server(options())
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for method, request in EVERY_CALL:
            call = cast("Any", channel).unary_unary(method)
            failed = await failure(call(request.SerializeToString()))
            assert (failed.code, failed.reason) == (Code.UNAVAILABLE, "MODEL_LOADING"), method
            assert failed.retry_s is not None
    await server.stop(0)


EVERY_CALL: list[tuple[str, Any]] = [
    ("/kvarts.v1.TokenizationService/Tokenize", tokenization_pb2.TokenizeRequest(text="x")),
    ("/kvarts.v1.TokenizationService/Detokenize", tokenization_pb2.DetokenizeRequest()),
    ("/kvarts.v1.ModelService/GetModel", model_pb2.GetModelRequest()),
    ("/kvarts.v1.ModelService/GetServerInfo", model_pb2.GetServerInfoRequest()),
    ("/kvarts.v1.SlotService/ListSlots", slot_pb2.ListSlotsRequest()),
    ("/kvarts.v1.SlotService/EraseSlot", slot_pb2.EraseSlotRequest(slot_id=0)),
    ("/kvarts.v1.LoraService/ListAdapters", lora_pb2.ListAdaptersRequest()),
    ("/kvarts.v1.RebuildService/GetPools", rebuild_pb2.GetPoolsRequest()),
    ("/kvarts.v1.GenerationService/Generate", GenerateRequest(text="x")),
]


async def test_a_bug_is_logged_under_an_id_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            raise ValueError(f"cannot encode {text}")

    with caplog.at_level(logging.DEBUG):
        async with serving(model={"tokenizer": Broken()}) as it:
            failed = await failure(it.collect(GenerateRequest(text="canary")))
    assert (failed.code, failed.reason) == (Code.INTERNAL, "INTERNAL")
    (log,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert failed.metadata["errorId"] in log
    assert "ValueError" in log
    assert "canary" not in failed.text + str(failed.metadata) + caplog.text


async def test_a_device_fault_ends_its_request_alone() -> None:
    runner = FakeRunner(num_pages=64, page_tokens=16)
    async with serving(runner=runner) as it:
        runner.fail_with = RuntimeError("device lost")
        failed = await failure(it.collect(GenerateRequest(text="x", max_tokens=1)))
        assert await it.collect(GenerateRequest(text="x", max_tokens=1))
    assert (failed.code, failed.reason) == (Code.INTERNAL, "ENGINE_FAULT")
    assert failed.metadata["errorId"]
    assert "device lost" not in failed.text


async def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    runner = FakeRunner(num_pages=64, page_tokens=16, poison=(7, 7))
    async with serving(runner=runner) as it:
        failed = await failure(it.collect(GenerateRequest(tokens=tokens(7, 7, 8))))
        assert await it.collect(GenerateRequest(tokens=tokens(7, 8), max_tokens=1))
    assert (failed.code, failed.reason) == (Code.INTERNAL, "ENGINE_FAULT")


async def test_a_deadline_that_the_engine_sees_first() -> None:
    clock, gate = FakeClock(), StepGate()
    async with serving(runner=gated_runner(gate), clock=clock) as it:
        call = asyncio.create_task(it.collect(GenerateRequest(text="x", max_tokens=9), timeout=100))
        await gate.arrival()
        clock.advance(101)
        gate.open()
        failed = await failure(call)
    assert (failed.code, failed.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE")
    # gRPC rounds timeouts up on the wire.
    assert 50 < float(failed.metadata["deadlineS"]) < 101


async def test_a_prompt_that_does_not_fit() -> None:
    async with serving() as it:
        by_ids = await failure(it.collect(GenerateRequest(tokens=tokens(*[5] * 256))))
        by_text = await failure(it.collect(GenerateRequest(text="x" * 2000)))
    assert (by_ids.code, by_ids.reason) == (Code.OUT_OF_RANGE, "CONTEXT_OVERFLOW")
    assert by_ids.metadata == {"promptTokens": "256", "contextTokens": "256"}
    assert by_text.metadata == {"promptTokens": "2001", "contextTokens": "256"}


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(tokens=tokens(5, 101)),
        GenerateRequest(text="x", preserved_tokens=[101]),
        GenerateRequest(text="x", sampling=SamplingParams(logit_bias={101: 1.0})),
    ],
)
async def test_a_token_that_is_not_in_the_vocabulary(request_: GenerateRequest) -> None:
    async with serving() as it:
        failed = await failure(it.collect(request_))
    assert (failed.code, failed.reason) == (Code.INVALID_ARGUMENT, "TOKEN_NOT_IN_VOCAB")
    assert failed.metadata == {"tokenId": "101", "vocabSize": "101"}


async def test_tokens_out_of_the_vocabulary_in_the_other_calls() -> None:
    mixed = tokenization_pb2.MixedPrompt(parts=[tokenization_pb2.PromptPart(tokens=tokens(101))])
    async with serving() as it:
        for call in (
            it.tokenization.Tokenize(tokenization_pb2.TokenizeRequest(mixed=mixed)),
            it.tokenization.Detokenize(tokenization_pb2.DetokenizeRequest(token_ids=[1, 101])),
            it.embedding.Embed(
                embedding_pb2.EmbedRequest(inputs=[embedding_pb2.EmbedInput(tokens=tokens(101))])
            ),
            it.slots.SaveSlot(
                slot_pb2.SaveSlotRequest(slot_id=0, filename="a", tokens=tokens(101))
            ),
        ):
            assert (await failure(call)).reason == "TOKEN_NOT_IN_VOCAB"


@pytest.mark.parametrize(
    ("asked", "reason"), [("new", "VOCABULARY_CHANGED"), ("a" * 65, "INVALID_FIELD")]
)
async def test_ids_of_another_vocabulary(asked: str, reason: str) -> None:
    """Before anything else of them is looked at: what they are out of is not known."""
    embedded = embedding_pb2.EmbedInput(tokens=tokens(101))
    mixed = tokenization_pb2.MixedPrompt(parts=[tokenization_pb2.PromptPart(tokens=tokens(101))])
    async with serving(model={"vocabulary": "old"}) as it:
        for call in (
            it.collect(GenerateRequest(tokens=tokens(101), vocabulary=asked)),
            it.tokenization.Tokenize(
                tokenization_pb2.TokenizeRequest(mixed=mixed, vocabulary=asked)
            ),
            it.embedding.Embed(embedding_pb2.EmbedRequest(inputs=[embedded], vocabulary=asked)),
            it.slots.SaveSlot(
                slot_pb2.SaveSlotRequest(
                    slot_id=0, filename="a", tokens=tokens(101), vocabulary=asked
                )
            ),
        ):
            failed = await failure(call)
            assert failed.reason == reason
            if reason == "VOCABULARY_CHANGED":
                assert failed.code is Code.ABORTED
                assert failed.metadata == {"asked": "new", "served": "old"}
        await it.collect(GenerateRequest(tokens=tokens(1), max_tokens=1, vocabulary="old"))
        told = await it.model.GetModel(model_pb2.GetModelRequest())
        assert told.model.vocabulary == "old"


async def test_a_full_queue() -> None:
    gate = StepGate()
    config = replace(CONFIG, num_slots=1, queue_requests=1)
    request = GenerateRequest(text="x", max_tokens=3)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(it.collect(request))
        await gate.arrival()
        gate.step()
        # The first has left the queue for good once its first step is over.
        await gate.arrival()
        waiting = asyncio.create_task(it.collect(request))
        await it.commanded("submit")
        await it.commanded("submit")
        refused = await failure(it.collect(request))
        gate.open()
        assert await running
        assert await waiting
    assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refused.metadata == {"queued": "1", "limit": "1"}
    assert refused.retry_s is not None


async def test_a_prompt_that_the_pool_cannot_hold_even_alone() -> None:
    config = replace(CONFIG, kv_pages=4)
    async with serving(config=config) as it:
        failed = await failure(it.collect(GenerateRequest(tokens=tokens(*[5] * 100))))
    assert (failed.code, failed.reason) == (Code.RESOURCE_EXHAUSTED, "KV_PAGES_EXHAUSTED")
    assert failed.metadata == {"needed": "7", "free": "4"}
    assert failed.retry_s is not None


async def test_an_id_that_is_in_flight() -> None:
    gate = StepGate()
    request = GenerateRequest(text="x", request_id="twice", max_tokens=1)
    async with serving(runner=gated_runner(gate)) as it:
        first = asyncio.create_task(it.collect(request))
        await gate.arrival()
        second = await failure(it.collect(request))
        gate.open()
        assert await first
        assert await it.collect(request)
    assert (second.code, second.reason) == (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    assert second.metadata == {"requestId": "twice"}


async def test_a_refused_sample_takes_the_others_with_it() -> None:
    gate = StepGate()
    # About 1,100 bytes a sample: the first gets in, the second does not.
    config = replace(CONFIG, num_slots=2, queue_bytes=2000)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        running = asyncio.create_task(it.collect(GenerateRequest(text="x", max_tokens=1)))
        await gate.arrival()
        refused = await failure(it.collect(GenerateRequest(text="y" * 100, num_samples=2)))
        gate.open()
        assert await running
        # Whatever was admitted of the pair is gone by the time that this one has run.
        assert await it.collect(GenerateRequest(text="z", max_tokens=1))
        assert it.engine.snapshot().running == 0
    assert refused.reason == "QUEUE_FULL"
    assert int(refused.metadata["queued"]) > 2000


async def test_the_samples_of_a_call_count_once_in_the_queue() -> None:
    gate = StepGate()
    config = replace(CONFIG, num_slots=2, queue_requests=1)
    async with serving(config=config, runner=gated_runner(gate)) as it:
        first = asyncio.create_task(it.collect(GenerateRequest(text="x", max_tokens=1)))
        await gate.arrival()
        # It has started, and so waits no longer.
        samples = GenerateRequest(text="y", num_samples=2, max_tokens=1)
        second = asyncio.create_task(it.collect(samples))
        for _ in range(3):
            await it.commanded("submit")
        refused = await failure(it.collect(GenerateRequest(text="z", max_tokens=1)))
        gate.open()
        assert await first
        assert await second
    assert refused.reason == "QUEUE_FULL"
    assert refused.metadata == {"queued": "1", "limit": "1"}


SLOT_FILE_CALLS: list[tuple[str, Any]] = [
    ("SaveSlot", slot_pb2.SaveSlotRequest(slot_id=0, filename="a.slot")),
    ("RestoreSlot", slot_pb2.RestoreSlotRequest(slot_id=0, filename="a.slot")),
    ("ListSlotFiles", slot_pb2.ListSlotFilesRequest()),
    ("DeleteSlotFile", slot_pb2.DeleteSlotFileRequest(filename="a.slot")),
]


@pytest.mark.parametrize(("method", "request_"), SLOT_FILE_CALLS)
async def test_without_a_slot_directory(method: str, request_: Any) -> None:
    async with serving() as it:
        failed = await failure(getattr(it.slots, method)(request_))
    assert (failed.code, failed.reason) == (Code.UNIMPLEMENTED, "SLOT_SAVE_DISABLED")


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("EraseSlot", slot_pb2.EraseSlotRequest(slot_id=4)),
        ("SaveSlot", slot_pb2.SaveSlotRequest(slot_id=4, filename="a")),
        ("RestoreSlot", slot_pb2.RestoreSlotRequest(slot_id=4, filename="a")),
    ],
)
async def test_a_slot_that_does_not_exist(method: str, request_: Any) -> None:
    async with serving() as it:
        failed = await failure(getattr(it.slots, method)(request_))
    assert (failed.code, failed.reason) == (Code.NOT_FOUND, "NO_SUCH_SLOT")
    assert failed.metadata == {"slotId": "4", "slotCount": "4"}


async def test_generate_on_a_slot_that_does_not_exist() -> None:
    async with serving() as it:
        failed = await failure(it.collect(GenerateRequest(text="x", slot_id=4)))
    assert (failed.code, failed.reason) == (Code.NOT_FOUND, "NO_SUCH_SLOT")


async def test_a_busy_slot_of_a_caller_who_does_not_wait() -> None:
    gate = StepGate()
    async with serving(runner=gated_runner(gate)) as it:
        request = GenerateRequest(text="x", request_id="busy", slot_id=1, max_tokens=2)
        running = asyncio.create_task(it.collect(request))
        await gate.arrival()
        impatient = asyncio.create_task(
            failure(it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=1, fail_if_busy=True)))
        )
        await it.commanded("erase_slot")
        patient = asyncio.create_task(
            _awaited(it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=1)))
        )
        await it.commanded("erase_slot")
        gate.open()
        failed = await impatient
        assert await running
        erased = await patient
    assert (failed.code, failed.reason) == (Code.ABORTED, "SLOT_BUSY")
    assert failed.metadata == {"slotId": "1", "requestId": "busy"}
    assert failed.retry_s is not None
    assert (erased.erased_tokens, erased.freed_pages) == (3, 1)


async def _awaited(call: Any) -> Any:
    return await call


async def test_an_adapter_that_is_not_loaded() -> None:
    adapters = common_pb2.AdapterScales(scales=[common_pb2.AdapterScale(adapter_id=3, scale=1)])
    async with serving() as it:
        failed = await failure(it.collect(GenerateRequest(text="x", adapters=adapters)))
        empty = common_pb2.AdapterScales()
        assert await it.collect(GenerateRequest(text="x", adapters=empty, max_tokens=1))
    assert (failed.code, failed.reason) == (Code.NOT_FOUND, "NO_SUCH_ADAPTER")
    assert failed.metadata == {"adapterId": "3"}


LATER: list[tuple[str, str, Any, str]] = [
    (
        "embedding",
        "Embed",
        embedding_pb2.EmbedRequest(inputs=[embedding_pb2.EmbedInput(text="x")]),
        "embeddings: the server was not started for them",
    ),
]


@pytest.mark.parametrize(("service", "method", "request_", "feature"), LATER)
async def test_what_later_issues_bring(
    service: str, method: str, request_: Any, feature: str
) -> None:
    async with serving() as it:
        failed = await failure(getattr(getattr(it, service), method)(request_))
    assert (failed.code, failed.reason) == (Code.UNIMPLEMENTED, "NOT_SUPPORTED")
    assert failed.metadata == {"feature": feature}


async def test_a_model_that_cannot_chat() -> None:
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="x")])
    async with serving(model={"template": None}) as it:
        generate = await failure(it.collect(GenerateRequest(chat=chat)))
        apply = await failure(
            it.tokenization.ApplyChatTemplate(tokenization_pb2.ApplyChatTemplateRequest(chat=chat))
        )
    assert generate.reason == apply.reason == "NOT_SUPPORTED"


async def test_a_template_that_fails_on_these_messages() -> None:
    chat = common_pb2.ChatPrompt(messages=[common_pb2.ChatMessage(role="user", content="boom")])
    async with serving() as it:
        failed = await failure(it.collect(GenerateRequest(chat=chat)))
    assert (failed.code, failed.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert "boom" in failed.text


async def test_a_request_of_16_mib_is_read_and_one_byte_more_is_not() -> None:
    async with serving() as it:
        passed = await failure(it.embedding.Embed(_padded(16 << 20)))
        refused = await failure(it.embedding.Embed(_padded((16 << 20) + 1)))
    assert passed.reason == "NOT_SUPPORTED"
    assert refused.code == Code.RESOURCE_EXHAUSTED


def _padded(size: int) -> embedding_pb2.EmbedRequest:
    request = embedding_pb2.EmbedRequest(inputs=[embedding_pb2.EmbedInput(text="x" * (size - 64))])
    request.inputs[0].text += "x" * (size - request.ByteSize())
    assert request.ByteSize() == size
    return request
