"""The official `openai` client, streaming and not."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.conftest import KEY, SLOT_TOKENS, Server

pytestmark = pytest.mark.slow

MODEL = "any"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "a little day"}]


@pytest.fixture
async def api(server: Server) -> AsyncGenerator[AsyncOpenAI]:
    async with _api(server, KEY) as api:
        yield api


def _api(server: Server, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


async def test_models_name_the_file(api: AsyncOpenAI) -> None:
    models = await api.models.list()
    assert [model.id.endswith("tiny.gguf") for model in models.data] == [True]


async def test_completion_streams_what_it_answers_at_once(api: AsyncOpenAI) -> None:
    whole = await api.completions.create(
        model=MODEL, prompt="the day", max_tokens=12, temperature=0
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12

    stream = await api.completions.create(
        model=MODEL, prompt="the day", max_tokens=12, temperature=0, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_chat_streams_what_it_answers_at_once(api: AsyncOpenAI) -> None:
    whole = await api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, temperature=0
    )
    message = whole.choices[0].message
    assert (message.role, whole.choices[0].finish_reason) == ("assistant", "length")
    assert message.content
    assert whole.usage is not None

    stream = await api.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    texts = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(texts) == message.content
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert usage.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_chat_logprobs(api: AsyncOpenAI, is_streamed: bool) -> None:
    if is_streamed:
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            stream=True,
        )
        given = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
    else:
        whole = await api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=4,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        given = [whole.choices[0].logprobs]
    tokens = [token for part in given if part for token in part.content or ()]
    assert len(tokens) == 4
    for token in tokens:
        assert len(token.top_logprobs) == 3
        # Greedy: the sampled token is the likeliest.
        assert token.logprob == token.top_logprobs[0].logprob <= 0


async def test_a_wrong_key_is_an_authentication_error(server: Server) -> None:
    async with _api(server, "wrong") as api:
        with pytest.raises(openai.AuthenticationError) as caught:
            await api.completions.create(model=MODEL, prompt="the")
    assert caught.value.status_code == 401
    assert caught.value.type == "authentication_error"


async def test_a_bad_field_is_a_bad_request(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.completions.create(model=MODEL, prompt="the", extra_body={"repeat_last_n": -5})
    assert caught.value.type == "invalid_request_error"
    assert "repeat_last_n" in caught.value.message


async def test_a_long_prompt_is_a_bad_request_with_both_numbers(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.completions.create(model=MODEL, prompt=[5] * (SLOT_TOKENS + 7))
    assert caught.value.type == "exceed_context_size_error"
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["n_prompt_tokens"] == SLOT_TOKENS + 7
    assert caught.value.body["n_ctx"] == SLOT_TOKENS


async def test_closing_a_stream_frees_the_slot(api: AsyncOpenAI, server: Server) -> None:
    before = (await server.rpc.info()).counters.requests_cancelled
    stream = await api.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    await server.rpc.cancelled(before + 1)
    await server.rpc.idle()
