"""Generate: what the stream holds, for every way to give a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from kvarts.v1 import common_pb2, generation_pb2, slot_pb2, tokenization_pb2

from service.defaults import GenerationDefaults
from tests.contract.serving import (
    CONFIG,
    FACTS,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    failure,
    serving,
)
from tests.fake_logits import scripted
from tests.fake_runner import FakeRunner
from tests.fake_text import FakeTokenizer

TOKENIZER = FakeTokenizer()
SLOTS = slot_pb2.ListSlotsRequest()

CallGroup = generation_pb2.CallGroup


def says(answer: str, prompt: str) -> FakeRunner:
    """A model that answers this prompt (a BOS comes before it) with this text, then ends."""
    tokens = TOKENIZER.encode(answer, add_special=False, parse_special=False)
    return FakeRunner(
        num_pages=64, page_tokens=16, next_token=scripted(tokens, prompt_tokens=1 + len(prompt))
    )


def text_of(responses: list[GenerateResponse], index: int = 0) -> str:
    return "".join(r.chunk.text for r in responses if r.HasField("chunk") if r.chunk.index == index)


def kinds(responses: list[GenerateResponse]) -> list[str | None]:
    return [response.WhichOneof("event") for response in responses]


async def test_a_stream_is_started_then_a_chunk_per_token_then_finished() -> None:
    async with serving(runner=says("hello", "say")) as it:
        responses = await it.collect(GenerateRequest(text="say", request_id="mine"))
    assert kinds(responses) == ["started", *["chunk"] * 6, "finished"]
    started, finished = responses[0].started, responses[-1].finished
    assert (started.request_id, started.prompt_tokens, started.cached_tokens) == ("mine", 4, 0)
    assert started.no_reuse_reason
    assert text_of(responses) == "hello"
    assert [r.chunk.completion_tokens for r in responses[1:-1]] == [1, 2, 3, 4, 5, 6]
    assert finished.finish_reason == generation_pb2.FINISH_REASON_EOS
    assert finished.stop_token_id == TOKENIZER.eos_token
    assert (finished.completion_tokens, finished.held_tokens) == (6, 9)


async def test_token_ids_are_taken_as_they_are() -> None:
    async with serving() as it:
        request = GenerateRequest(tokens=common_pb2.TokenIds(ids=[5, 6, 7]), max_tokens=1)
        responses = await it.collect(request)
    assert responses[0].started.prompt_tokens == 3


async def test_the_same_prompt_again_is_cached_but_for_its_last_token() -> None:
    request = GenerateRequest(text="a prompt of some length", max_tokens=1)
    async with serving() as it:
        first = await it.collect(request)
        again = await it.collect(request)
    assert again[0].started.cached_tokens == again[0].started.prompt_tokens - 1
    assert again[0].started.cache_source == generation_pb2.CACHE_SOURCE_SLOT
    assert text_of(again) == text_of(first)


async def test_without_the_prompt_cache_nothing_is_reused() -> None:
    request = GenerateRequest(text="a prompt of some length", max_tokens=1, cache_prompt=False)
    async with serving() as it:
        await it.collect(request)
        again = await it.collect(request)
    assert again[0].started.cached_tokens == 0


async def test_a_stop_text_ends_it_and_is_cut_off() -> None:
    async with serving(runner=says("one two three", "count")) as it:
        responses = await it.collect(GenerateRequest(text="count", stop=[" three"]))
    finished = responses[-1].finished
    assert text_of(responses) == "one two"
    assert finished.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert (finished.stop_string, finished.stop_string_tokens) == (" three", 6)


async def test_the_end_of_a_turn_of_a_family_ends_its_answers() -> None:
    """Of templates whose mark of it is no end-of-generation token in every file."""
    facts = replace(FACTS, chat_template="<role>ASSISTANT</role> <arg_key> <|role_end|>")
    asked = chat(("user", "yo"))
    said = says("one<|role_end|>two", "user:yo|assistant:")
    async with serving(runner=said, model={"facts": facts}) as it:
        responses = await it.collect(GenerateRequest(chat=asked))
    finished = responses[-1].finished
    assert (text_of(responses), finished.stop_string) == ("one", "<|role_end|>")


async def test_a_spent_budget_leaves_withheld_text_in_finished() -> None:
    async with serving(runner=says("one two", "count")) as it:
        responses = await it.collect(GenerateRequest(text="count", stop=["e!"], max_tokens=3))
    assert text_of(responses) == "on"
    assert responses[-1].finished.unsent_text == "e"
    assert responses[-1].finished.finish_reason == generation_pb2.FINISH_REASON_LENGTH


async def test_log_probabilities_are_there_when_asked_for() -> None:
    async with serving() as it:
        responses = await it.collect(GenerateRequest(text="x", max_tokens=1, top_logprobs=3))
        silent = await it.collect(GenerateRequest(text="x", max_tokens=1))
        sampled_only = await it.collect(GenerateRequest(text="x", max_tokens=1, top_logprobs=0))
    logprobs = responses[1].chunk.logprobs
    assert logprobs.sampled.token_id == responses[1].chunk.token_id
    assert logprobs.sampled.piece == TOKENIZER.piece(logprobs.sampled.token_id)
    assert len(logprobs.top) == 3
    assert [t.logprob for t in logprobs.top] == sorted(t.logprob for t in logprobs.top)[::-1]
    assert not silent[1].chunk.HasField("logprobs")
    assert sampled_only[1].chunk.HasField("logprobs")
    assert not sampled_only[1].chunk.logprobs.top


async def test_progress_is_told_when_asked_for() -> None:
    async with serving() as it:
        request = GenerateRequest(text="x" * 50, max_tokens=1, return_progress=True)
        responses = await it.collect(request)
    progress = [r.progress for r in responses if r.HasField("progress")]
    assert [p.processed_tokens for p in progress] == [0, 51]
    assert {p.total_tokens for p in progress} == {51}


async def test_samples_run_side_by_side_with_rising_seeds() -> None:
    sampling = SamplingParams(seed=2**32 - 2)
    async with serving() as it:
        request = GenerateRequest(
            text="x",
            request_id="n",
            num_samples=3,
            max_tokens=50,
            ignore_eos=True,
            sampling=sampling,
        )
        responses = await it.collect(request)
    started = {r.started.index: r.started for r in responses if r.HasField("started")}
    assert {s.request_id for s in started.values()} == {"n"}
    assert [started[i].seed for i in range(3)] == [2**32 - 2, 2**32 - 1, 0]
    assert len({s.slot_id for s in started.values()}) == 3
    assert sorted(r.finished.index for r in responses if r.HasField("finished")) == [0, 1, 2]


async def test_calls_of_a_group_begin_together_in_the_order_of_their_places() -> None:
    async with serving() as it:

        def call(index: int) -> asyncio.Future[list[GenerateResponse]]:
            group = CallGroup(id="body", num_calls=2, index=index)
            request = GenerateRequest(text=f"{index}ab", max_tokens=1, group=group)
            return asyncio.ensure_future(it.collect(request))

        second = call(1)
        # This comes later over the same connection, and is queued at once.
        await it.collect(GenerateRequest(text="cd", max_tokens=1))
        assert (it.commands.qsize(), second.done()) == (1, False)
        streams = await asyncio.gather(call(0), second)
        # Of slots that hold nothing of a prompt the last is given first.
        assert [stream[0].started.slot_id for stream in streams] == [3, 2]


async def test_a_group_counts_once_in_the_queue() -> None:
    async with serving(config=replace(CONFIG, queue_requests=1)) as it:

        def call(index: int) -> Any:
            group = CallGroup(id="body", num_calls=4, index=index)
            return it.collect(GenerateRequest(text="ab", max_tokens=1, group=group))

        streams = await asyncio.gather(*(call(index) for index in range(4)))
        assert all(kinds(stream)[-1] == "finished" for stream in streams)


async def test_a_group_of_another_tenant_is_another_one() -> None:
    async with serving(api_keys=("one", "two")) as it:

        def call(key: str, index: int) -> Any:
            group = CallGroup(id="body", num_calls=2, index=index)
            request = GenerateRequest(text="ab", max_tokens=1, group=group)
            return it.collect(request, metadata=(("authorization", f"Bearer {key}"),))

        streams = await asyncio.gather(*(call(key, i) for i in (0, 1) for key in ("one", "two")))
        assert all(kinds(stream)[-1] == "finished" for stream in streams)


async def test_the_text_of_the_prompt_is_told_when_asked_for() -> None:
    tokens = TOKENIZER.encode(" a b", add_special=True, parse_special=False)
    request = GenerateRequest(
        tokens=common_pb2.TokenIds(ids=tokens),
        num_samples=2,
        max_tokens=1,
        return_prompt_text=True,
    )
    async with serving() as it:
        told = await it.collect(request)
        request.return_prompt_text = False
        silent = await it.collect(request)
        shown = await it.tokenization.Detokenize(
            tokenization_pb2.DetokenizeRequest(token_ids=tokens, as_prompt=True)
        )
    ends = [r.finished.prompt_text for r in told if r.HasField("finished")]
    assert ends == [shown.text] * 2 == ["<s> a b"] * 2
    assert [r.finished.prompt_text for r in silent if r.HasField("finished")] == [""] * 2


async def test_a_random_seed_is_told() -> None:
    async with serving() as it:
        request = GenerateRequest(text="x", max_tokens=1, sampling=SamplingParams(seed=2**32 - 1))
        responses = await it.collect(request)
    # The fake engine draws this one.
    assert responses[0].started.seed == 42


async def test_an_empty_prompt_finishes_without_a_token() -> None:
    async with serving() as it:
        responses = await it.collect(GenerateRequest(tokens=common_pb2.TokenIds()))
    assert kinds(responses) == ["started", "finished"]
    assert responses[1].finished.finish_reason == generation_pb2.FINISH_REASON_EMPTY_PROMPT


async def test_a_pinned_slot_is_used() -> None:
    async with serving() as it:
        responses = await it.collect(GenerateRequest(text="x", max_tokens=1, slot_id=2))
    assert responses[0].started.slot_id == 2


async def test_an_indented_block_ends_with_its_first_outdented_line() -> None:
    async with serving(runner=says(" a\n  b\nc d", "code")) as it:
        responses = await it.collect(GenerateRequest(text="code", n_indent=2))
    finished = responses[-1].finished
    assert finished.finish_reason == generation_pb2.FINISH_REASON_INDENT
    whole = text_of(responses) + finished.unsent_text
    assert whole[: -finished.indent_cut_chars] == " a\n  b\n"


async def test_the_request_id_comes_back_as_a_header() -> None:
    async with serving() as it:
        call = it.generation.Generate(GenerateRequest(text="x", max_tokens=1, request_id="abc"))
        assert dict(await call.initial_metadata())["x-request-id"] == "abc"
        assert [r async for r in call]
        call = it.generation.Generate(GenerateRequest(text="x", max_tokens=1))
        minted = dict(await call.initial_metadata())["x-request-id"]
        responses = [r async for r in call]
    assert responses[0].started.request_id == minted
    assert len(minted) == 32


@pytest.mark.parametrize(("answer", "text"), [("abc", "ab"), ("azb", "a")])
async def test_silent_requests_run_under_the_servers_defaults(answer: str, text: str) -> None:
    defaults = GenerationDefaults(max_tokens=2, stop=("z",))
    async with serving(runner=says(answer, "x"), model={"defaults": defaults}) as it:
        responses = await it.collect(GenerateRequest(text="x"))
        (slot,) = [s for s in (await it.slots.ListSlots(SLOTS)).slots if s.HasField("settings")]
    assert (text_of(responses), responses[-1].finished.completion_tokens) == (text, 2)
    assert slot.settings.max_tokens == 2


def chat(*turns: tuple[str, str], **changes: Any) -> common_pb2.ChatPrompt:
    messages = [common_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return common_pb2.ChatPrompt(messages=messages, **changes)


async def test_a_chat_is_rendered_and_answered_in_deltas() -> None:
    async with serving(runner=says("hi", "user:yo|assistant:")) as it:
        responses = await it.collect(GenerateRequest(chat=chat(("user", "yo"))))
    deltas = [delta.content for r in responses for delta in r.chunk.chat_deltas]
    assert deltas == ["h", "i"]
    assert text_of(responses) == "hi"
    # BOS comes before the rendered text.
    assert responses[0].started.prompt_tokens == 1 + len("user:yo|assistant:")


async def test_a_trailing_assistant_message_is_continued_and_echoed_on_request() -> None:
    turns = (("user", "yo"), ("assistant", "well,"))
    prompt = "user:yo|assistant:well,"
    async with serving(runner=says(" ok", prompt)) as it:
        request = GenerateRequest(chat=chat(*turns, echo_final_message=True))
        echoed = await it.collect(request)
        plain = await it.collect(GenerateRequest(chat=chat(*turns)))
        closed = await it.collect(
            GenerateRequest(
                chat=chat(*turns, final_message=common_pb2.FINAL_MESSAGE_CLOSED), max_tokens=1
            )
        )
    assert echoed[0].started.prompt_tokens == 1 + len(prompt)
    assert next(d.content for r in echoed for d in r.chunk.chat_deltas) == "well,"
    assert next(d.content for r in plain for d in r.chunk.chat_deltas) == " "
    assert closed[0].started.prompt_tokens == 1 + len("user:yo|assistant:well,|assistant:")


async def test_a_time_limit_ends_at_a_newline() -> None:
    ticks = iter(range(10_000))
    limit = Duration(seconds=1)
    async with serving(runner=says("a\nb\nc\nd", "x"), clock=lambda: float(next(ticks))) as it:
        responses = await it.collect(GenerateRequest(text="x", time_limit=limit))
    assert responses[-1].finished.finish_reason == generation_pb2.FINISH_REASON_TIME


UNSUPPORTED = [
    (
        GenerateRequest(
            chat=chat(
                ("user", "x"),
                tools=[common_pb2.Tool(name="f")],
                tool_choice=common_pb2.TOOL_CHOICE_REQUIRED,
            )
        ),
        "required tool calls (how this model's template writes them is unknown)",
    ),
]


@pytest.mark.parametrize(("request_", "feature"), UNSUPPORTED)
async def test_what_is_missing_is_refused_by_name(request_: GenerateRequest, feature: str) -> None:
    async with serving() as it:
        failed = await failure(it.collect(request_))
    assert failed.reason == "NOT_SUPPORTED"
    assert failed.metadata == {"feature": feature}


async def test_a_prompt_that_is_too_long_is_refused_before_its_ids_are_looked_at():
    """Millions of them would hold the event loop up; the last one is none of the vocabulary's."""
    request = GenerateRequest()
    request.tokens.ids.extend([5] * CONFIG.context_tokens + [2**32 - 1])
    async with serving() as it:
        failed = await failure(it.collect(request))
    assert failed.reason == "CONTEXT_OVERFLOW"


async def test_a_prompt_that_is_too_long_counts_as_a_use_of_its_slot():
    """As the peer's clients see it: the next prompt goes to the other slot."""
    taken: list[int] = []
    for comes_after_one in (False, True):
        async with serving(config=replace(CONFIG, num_slots=2)) as it:
            if comes_after_one:
                request = GenerateRequest()
                request.tokens.ids.extend([5] * CONFIG.context_tokens)
                assert (await failure(it.collect(request))).reason == "CONTEXT_OVERFLOW"
            answer = await it.collect(GenerateRequest(text="x", max_tokens=1))
            taken.append(answer[0].started.slot_id)
    assert sorted(taken) == [0, 1]
