"""The unary services: tokenisation, facts, slots, adapters, pools; and log lines."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import types
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import grpc
import pytest
from kvarts.v1 import (
    common_pb2,
    lora_pb2,
    model_pb2,
    rebuild_pb2,
    slot_pb2,
    tokenization_pb2,
)

from engine.requests import Request, Sampler, SamplingParams
from engine.scheduling.erasing import ErasedSlot
from service import tokenization
from service.defaults import GenerationDefaults
from service.loaded import ModelNames
from service.off_loop import HEAVY
from tests.contract.calls import CHAT
from tests.contract.serving import (
    CONFIG,
    FACTS,
    GenerateRequest,
    Serving,
    StepGate,
    failure,
    gated_runner,
    read_failure,
    serving,
)
from tests.fake_text import FakeTokenizer

TOKENIZER = FakeTokenizer()
A, B = TOKENIZER.encode("ab", add_special=False, parse_special=False)
BOS, EOS = TOKENIZER.bos_token, TOKENIZER.eos_token
TokenizeRequest = tokenization_pb2.TokenizeRequest
DetokenizeRequest = tokenization_pb2.DetokenizeRequest


class ClosingTokenizer(FakeTokenizer):
    """Puts EOS behind text, too."""

    add_eos = True

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = super().encode(text, add_special=add_special, parse_special=parse_special)
        return [*ids, self.eos_token] if add_special else ids


async def ids(it: Serving, request: TokenizeRequest) -> list[int]:
    return [token.id for token in (await it.tokenization.Tokenize(request)).tokens]


async def test_tokenize_a_text() -> None:
    async with serving() as it:
        reply = await it.tokenization.Tokenize(TokenizeRequest(text="a\u20ac"))
        assert await ids(it, TokenizeRequest(text="ab", add_special=True)) == [BOS, A, B]
        assert await ids(it, TokenizeRequest(text="")) == []
        bare = await it.tokenization.Tokenize(TokenizeRequest(text="a", omit_pieces=True))
        alone = await it.tokenization.Tokenize(TokenizeRequest(text="a\u20ac", ids_only=True))
    assert list(alone.ids) == [token.id for token in reply.tokens]
    assert not alone.tokens
    # The euro's bytes are no characters of their own.
    assert [token.piece for token in reply.tokens] == [b"a", b"\xe2", b"\x82", b"\xac"]
    assert [(token.id, token.piece) for token in bare.tokens] == [(A, b"")]


async def test_a_long_text_is_tokenised_on_a_thread_with_the_same_result() -> None:
    async with serving() as it:
        assert await ids(it, TokenizeRequest(text="ab" * 1000)) == [A, B] * 1000


class WatchedTokenizer(FakeTokenizer):
    """Takes down how many texts are encoded at the same time, and on which threads."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.most_at_once = 0
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        self.threads.append(threading.current_thread().name)
        ids = super().encode(text, add_special=add_special, parse_special=parse_special)
        self.running -= 1
        return ids


async def test_eight_long_texts_are_tokenised_one_after_another() -> None:
    tokenizer, text = WatchedTokenizer(), "a" * (HEAVY + 1)
    async with serving(model={"tokenizer": tokenizer}) as it:
        asked = [TokenizeRequest(text=text, ids_only=True)] * 8
        replies = await asyncio.gather(*(it.tokenization.Tokenize(one) for one in asked))
    assert [len(reply.ids) for reply in replies] == [HEAVY + 1] * 8
    assert len(tokenizer.threads) == 8
    assert all(name.startswith("heavy") for name in tokenizer.threads)
    assert tokenizer.most_at_once == 1


async def test_a_long_request_is_parsed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    parsed = TokenizeRequest.FromString

    def parse(data: bytes) -> TokenizeRequest:
        threads.append(threading.current_thread().name)
        return parsed(data)

    monkeypatch.setattr(tokenization_pb2.TokenizeRequest, "FromString", parse)
    async with serving() as it:
        for size in (1, HEAVY + 1):
            await it.tokenization.Tokenize(TokenizeRequest(text="a" * size, ids_only=True))
    assert threads[0] == threading.current_thread().name
    assert threads[1].startswith("heavy")


async def test_ids_of_too_long_a_text_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "MAX_TEXT_BYTES", 3)
    async with serving() as it:
        fits = await it.tokenization.Detokenize(DetokenizeRequest(token_ids=[A, B, A]))
        refused = await failure(
            it.tokenization.Detokenize(DetokenizeRequest(token_ids=[A, B, A, B]))
        )
    assert fits.text == "aba"
    assert refused.reason == "INVALID_FIELD"
    assert "the text of 4 tokens is over 3 bytes" in refused.text


def mixed(*parts: str | list[int]) -> tokenization_pb2.MixedPrompt:
    return tokenization_pb2.MixedPrompt(
        parts=[
            tokenization_pb2.PromptPart(text=part)
            if isinstance(part, str)
            else tokenization_pb2.PromptPart(tokens=common_pb2.TokenIds(ids=part))
            for part in parts
        ]
    )


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("a", [B]), [BOS, A, B]),
        (([A], "b"), [A, B, EOS]),
        (("a", [A], "b"), [BOS, A, A, B, EOS]),
        (([A], "a", [B]), [A, A, B]),
        (("a",), [BOS, A, EOS]),
        ((), []),
    ],
)
async def test_a_mixed_prompt_gets_special_tokens_at_ends_that_are_text(
    parts: tuple[str | list[int], ...], expected: list[int]
) -> None:
    async with serving(model={"tokenizer": ClosingTokenizer()}) as it:
        request = TokenizeRequest(mixed=mixed(*parts), add_special=True)
        assert await ids(it, request) == expected
        plain = TokenizeRequest(mixed=mixed(*parts))
        assert await ids(it, plain) == [i for i in expected if i not in (BOS, EOS)]


async def test_detokenize_as_a_prompt_is_echoed() -> None:
    tokens = TOKENIZER.encode(" a b", add_special=False, parse_special=False)
    async with serving() as it:
        request = DetokenizeRequest(token_ids=tokens, render_special=False, as_prompt=True)
        assert (await it.tokenization.Detokenize(request)).text == "a b"
        request.as_prompt = False
        assert (await it.tokenization.Detokenize(request)).text == " a b"


async def test_detokenize_shows_special_tokens_unless_told_not_to() -> None:
    euro = TOKENIZER.encode("\u20ac", add_special=False, parse_special=False)
    async with serving() as it:
        shown = await it.tokenization.Detokenize(DetokenizeRequest(token_ids=[BOS, A, *euro]))
        hidden = await it.tokenization.Detokenize(
            DetokenizeRequest(token_ids=[BOS, A], render_special=False)
        )
        cut = await it.tokenization.Detokenize(DetokenizeRequest(token_ids=[A, euro[0]]))
    assert shown.text == "<s>a\u20ac"
    assert hidden.text == "a"
    assert (cut.text, cut.raw) == ("a\ufffd", b"a\xe2")


async def test_a_rendered_chat_counts_the_tokens_that_generate_would_run() -> None:
    request = tokenization_pb2.ApplyChatTemplateRequest(chat=CHAT)
    async with serving() as it:
        reply = await it.tokenization.ApplyChatTemplate(request)
        responses = await it.collect(GenerateRequest(chat=CHAT, max_tokens=1))
    assert reply.prompt == "user:x|assistant:"
    assert reply.prompt_tokens == responses[0].started.prompt_tokens


async def test_a_chat_brings_tools_arguments_and_effort_to_the_template() -> None:
    chat = common_pb2.ChatPrompt(
        messages=CHAT.messages,
        tools=[common_pb2.Tool(name="f", parameters_json='{"type":"object"}')],
        template_kwargs_json='{"a": 1}',
        reasoning_effort="none",
        add_generation_prompt=False,
    )
    defaults = GenerationDefaults(template_kwargs={"a": 0, "b": 2})
    request = tokenization_pb2.ApplyChatTemplateRequest(chat=chat)
    async with serving(model={"defaults": defaults}) as it:
        reply = await it.tokenization.ApplyChatTemplate(request)
    assert reply.prompt == "[f][a=1][b=2][enable_thinking=False]user:x|"


async def test_the_model_is_described() -> None:
    names = ModelNames("b", "m.gguf", aliases=("b", "a"), tags=("t",))
    async with serving(model={"names": names}) as it:
        model = (await it.model.GetModel(model_pb2.GetModelRequest())).model
    assert (model.id, model.aliases, model.tags) == ("b", ["a", "b"], ["t"])
    assert (model.path, model.name, model.architecture) == ("m.gguf", "Fake", "fake")
    assert model.vocab_type == model_pb2.VOCAB_TYPE_SPM
    assert model.vocab_size == TOKENIZER.vocab_size
    assert (model.num_params, model.size_bytes) == (FACTS.num_params, FACTS.size_bytes)
    assert (model.special_tokens.bos.id, model.special_tokens.bos.text) == (0, "<s>")
    assert not model.special_tokens.HasField("eot")
    assert model.special_tokens.eog_ids == [EOS]
    assert (model.add_bos, model.add_eos) == (True, False)
    assert model.chat_template.source == "{fake}"


async def test_the_server_tells_its_defaults_its_load_and_its_totals() -> None:
    sampling = SamplingParams(temperature=0.5, samplers=(Sampler.TOP_K,))
    defaults = GenerationDefaults(sampling=sampling, max_tokens=7, n_keep=-1)
    async with serving(model={"defaults": defaults}) as it:
        await it.collect(GenerateRequest(text="abc", max_tokens=3))
        info = (await it.model.GetServerInfo(model_pb2.GetServerInfoRequest())).info
    assert (info.num_slots, info.slot_context_tokens, info.queue_limit) == (4, 256, 256)
    assert info.defaults.sampling.temperature == 0.5
    assert not info.defaults.sampling.HasField("seed")
    assert len(info.defaults.sampling.samplers.samplers) == 1
    assert (info.defaults.max_tokens, info.defaults.n_keep) == (7, -1)
    assert info.counters.requests_finished == 1
    assert info.counters.generated_tokens == 3
    assert info.counters.prompt_tokens_evaluated + info.counters.prompt_tokens_cached == 4
    assert (info.gauges.running_requests, info.gauges.queued_requests) == (0, 0)
    assert info.features.generation
    assert not info.features.constraints
    assert info.start_time.seconds > 0


async def test_slots_show_what_they_run_and_what_they_ran() -> None:
    gate = StepGate()
    request = GenerateRequest(
        text="abc", request_id="mine", slot_id=2, max_tokens=3, annotation="note", stop=["zz"]
    )
    async with serving(runner=gated_runner(gate)) as it:
        call = asyncio.create_task(it.collect(request))
        await gate.arrival()
        gate.step()
        await gate.arrival()
        running = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
        gate.open()
        await call
        idle = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
    assert [slot.id for slot in running] == [0, 1, 2, 3]
    assert running[2].state == slot_pb2.SLOT_STATE_DECODE
    assert (running[2].decoded_tokens, running[2].remaining_tokens) == (1, 2)
    assert (running[2].request_id, running[2].annotation) == ("mine", "note")
    # What a client says is in no list.
    assert not running[2].settings.stop
    assert not running[2].settings.sampling.HasField("dry_sequence_breakers")
    assert not running[0].HasField("task_id")
    assert not running[0].HasField("settings")
    assert idle[2].state == slot_pb2.SLOT_STATE_IDLE
    assert (idle[2].held_tokens, idle[2].num_pages, idle[2].request_id) == (6, 1, "mine")


async def test_an_erased_slot_holds_nothing() -> None:
    async with serving() as it:
        await it.collect(GenerateRequest(text="abc", slot_id=1, max_tokens=1))
        erased = await it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=1))
        again = await it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=1))
        slots = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
        (pool,) = (await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())).pools
    assert (erased.slot_id, erased.erased_tokens, erased.freed_pages) == (1, 4, 1)
    assert (again.erased_tokens, again.freed_pages) == (0, 0)
    assert slots[1].held_tokens == 0
    assert pool.free == pool.size


async def test_giving_up_the_wait_for_a_busy_slot_leaves_it_as_it_is() -> None:
    gate = StepGate()
    async with serving(runner=gated_runner(gate)) as it:
        given_up = asyncio.Event()
        erase_slot = it.engine.erase_slot

        def watched(*args: Any, **kwargs: Any) -> Future[ErasedSlot]:
            done = erase_slot(*args, **kwargs)
            done.add_done_callback(lambda _: given_up.set())
            return done

        it.engine.erase_slot = watched
        call = asyncio.create_task(it.collect(GenerateRequest(text="abc", slot_id=1, max_tokens=2)))
        await gate.arrival()
        erase = it.slots.EraseSlot(slot_pb2.EraseSlotRequest(slot_id=1), timeout=0.3)
        expired = await failure(erase)
        # The client's clock rings first: the slot must not be free before the server has heard.
        async with asyncio.timeout(30):
            await given_up.wait()
        gate.open()
        await call
        slots = (await it.slots.ListSlots(slot_pb2.ListSlotsRequest())).slots
    assert expired.code.name == "DEADLINE_EXCEEDED"
    assert slots[1].held_tokens == 5


async def test_another_keys_slot_cannot_be_erased() -> None:
    def key(name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {name}"),)

    async with serving(api_keys=("a", "b")) as it:
        request = GenerateRequest(text="abc", slot_id=1, max_tokens=1)
        await it.collect(request, metadata=key("a"))
        erase = slot_pb2.EraseSlotRequest(slot_id=1)
        other = await failure(it.slots.EraseSlot(erase, metadata=key("b")))
        own = await it.slots.EraseSlot(erase, metadata=key("a"))
    assert (other.code.name, other.reason) == ("NOT_FOUND", "SLOT_CONTENT_NOT_FOUND")
    assert other.metadata == {"slotId": "1"}
    assert own.erased_tokens == 4


async def test_the_admin_key_erases_what_a_users_key_left() -> None:
    def key(name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {name}"),)

    async with serving(api_keys=("user",), admin_key="root") as it:
        request = GenerateRequest(text="abc", slot_id=1, max_tokens=1)
        await it.collect(request, metadata=key("user"))
        erase = slot_pb2.EraseSlotRequest(slot_id=1)
        erased = await it.slots.EraseSlot(erase, metadata=key("root"))
    assert erased.erased_tokens == 4


async def test_a_prompt_of_another_key_is_never_reused() -> None:
    request = GenerateRequest(text="the same prompt", slot_id=1, max_tokens=1)
    async with serving(api_keys=("a", "b")) as it:
        cached: list[int] = []
        for name in ("a", "b", "b"):
            header = (("authorization", f"Bearer {name}"),)
            responses = await it.collect(request, metadata=header)
            cached.append(responses[0].started.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_the_build_looks_like_the_peers() -> None:
    async with serving() as it:
        info = (await it.model.GetServerInfo(model_pb2.GetServerInfoRequest())).info
    assert info.version
    assert info.build_info == f"b0-{info.version}"


async def test_no_adapters_are_loaded() -> None:
    async with serving() as it:
        reply = await it.lora.ListAdapters(lora_pb2.ListAdaptersRequest())
    assert reply == lora_pb2.ListAdaptersResponse()


async def test_pools_are_shown() -> None:
    async with serving(config=replace(CONFIG, kv_pages=9)) as it:
        await it.collect(GenerateRequest(text="abc", max_tokens=1))
        reply = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
    (pool,) = reply.pools
    assert pool.kind == rebuild_pb2.POOL_KIND_KV
    assert (pool.size, pool.used, pool.pinned, pool.free) == (9, 0, 1, 8)
    assert pool.unit_tokens == 16
    assert (reply.budget_bytes, reply.fixed_bytes) == (1 << 40, 0)
    assert reply.state == rebuild_pb2.REBUILD_STATE_SERVING


async def test_the_window_pool_is_shown_beside_the_kv_pool() -> None:
    config = replace(CONFIG, num_slots=2, chunk_tokens=16, swa_evict_interval=8)
    async with serving(config=config, window=20) as it:
        await it.collect(GenerateRequest(text="a" * 99, max_tokens=1))
        reply = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
    kv, swa = reply.pools
    assert (kv.kind, swa.kind) == (rebuild_pb2.POOL_KIND_KV, rebuild_pb2.POOL_KIND_SWA)
    # Per slot ceil((20 + 16 + 16) / 16) + 1 pages; of 100 tokens those from 64 on are kept.
    assert (swa.size, swa.floor, swa.used, swa.pinned, swa.free) == (10, 10, 0, 3, 7)
    assert reply.fixed_bytes == (swa.size + 1) * swa.unit_bytes
    assert reply.budget_bytes == (1 << 40) - reply.fixed_bytes


async def test_each_call_has_one_log_line_without_its_content(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with caplog.at_level(logging.DEBUG):
        async with serving(api_keys=("sekret",)) as it:
            responses = await it.collect(
                GenerateRequest(text="canary", max_tokens=3, request_id="r1", annotation="noted"),
                metadata=(("authorization", "Bearer sekret"), ("traceparent", parent)),
            )
            await failure(it.collect(GenerateRequest(text="canary", n_keep=-2)))
    lines = [getattr(r, "fields", {}) for r in caplog.records if r.name == "kvarts.requests"]
    assert [line["code"] for line in lines] == ["OK", "UNAUTHENTICATED"]
    served = lines[0]
    assert (served["rpc"], served["request_id"]) == ("GenerationService/Generate", "r1")
    assert served["trace_id"] == "a" * 32
    assert (served["prompt_tokens"], served["output_tokens"]) == (7, 3)
    assert served["slot_id"] == responses[0].started.slot_id
    assert lines[1]["reason"] == "BAD_API_KEY"
    everything = caplog.text + str(lines)
    for secret in ("canary", "sekret", "noted"):
        assert secret not in everything


@pytest.mark.parametrize("prompt", [[A], [A] * 300])
async def test_no_request_outlives_its_call(prompt: list[int]) -> None:
    """Frames and errors that point at each other live until the collector's next full round."""
    async with serving() as it:
        request = GenerateRequest(tokens=common_pb2.TokenIds(ids=prompt), max_tokens=1)
        outcomes = [await _outcome(it, request)]
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            outcomes.append(await _outcome(it, request))
            gc.collect()
            frames = [one for one in gc.garbage if isinstance(one, types.FrameType)]
        finally:
            gc.set_debug(0)
            gc.enable()
            gc.garbage.clear()
        kept = [frame.f_code.co_qualname for frame in frames if _holds_request(frame)]
    assert outcomes == ["CONTEXT_OVERFLOW" if len(prompt) > 1 else ""] * 2
    assert not kept


async def _outcome(it: Serving, request: GenerateRequest) -> str:
    """The reason of its refusal, "" where it went well."""
    try:
        _ = [reply async for reply in it.generation.Generate(request)]
    except grpc.aio.AioRpcError as error:
        return read_failure(error).reason
    return ""


def _holds_request(frame: types.FrameType) -> bool:
    held = frame.f_locals.values()
    return any(isinstance(one, bytes | GenerateRequest | Request) for one in held)
