"""The official `anthropic` client: messages, streams, tools, counts, errors and cancelling."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam, ToolParam

from tests.e2e.conftest import CALL_TOKEN, KEY, Server, Start, healthy

pytestmark = pytest.mark.slow

MODEL = "any"
MESSAGES: list[MessageParam] = [{"role": "user", "content": "how warm is it?"}]
GREEDY = {"temperature": 0}
TOOLS: list[ToolParam] = [
    {
        "name": "warmth",
        "description": "how warm it is",
        "input_schema": {
            "type": "object",
            "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
            "required": ["unit"],
        },
    }
]


def _api(server: Server, key: str = KEY) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
async def caller(start_assistant: Start) -> AsyncGenerator[AsyncAnthropic]:
    """Of a server that is pushed to call: a message cannot say so itself."""
    with start_assistant("-l", f"{CALL_TOKEN}+100") as program:
        url = program.ready().http_url()
        await healthy(url)
        async with AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0, timeout=120) as api:
            yield api


@pytest.fixture
async def api(assistant: Server) -> AsyncGenerator[AsyncAnthropic]:
    async with _api(assistant) as api:
        yield api


async def test_a_stream_adds_up_to_the_message(api: AsyncAnthropic) -> None:
    whole = await api.messages.create(
        model=MODEL, max_tokens=12, messages=MESSAGES, system="be brief", extra_body=GREEDY
    )
    assert (whole.role, whole.stop_reason) == ("assistant", "max_tokens")
    (block,) = whole.content
    assert block.type == "text"
    assert whole.usage.output_tokens == 12
    async with api.messages.stream(
        model=MODEL, max_tokens=12, messages=MESSAGES, system="be brief", extra_body=GREEDY
    ) as stream:
        parts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(parts) == block.text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 12


async def test_a_tool_is_used_with_what_its_schema_allows(caller: AsyncAnthropic) -> None:
    answer = await caller.messages.create(
        model=MODEL, max_tokens=400, messages=MESSAGES, tools=TOOLS, tool_choice={"type": "any"}
    )
    assert answer.stop_reason == "tool_use"
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert uses
    for use in uses:
        assert use.name == "warmth"
        assert isinstance(use.input, dict)
        assert use.input["unit"] in ("celsius", "kelvin")
    # What it used is told in the next turn.
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "290"} for use in uses]
    following: list[MessageParam] = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": results},  # pyright: ignore[reportAssignmentType] # a list of the right dicts
    ]
    done = await caller.messages.create(model=MODEL, max_tokens=4, messages=following, tools=TOOLS)
    assert done.usage.input_tokens + (done.usage.cache_read_input_tokens or 0) > 0


async def test_a_streamed_use_of_a_tool_is_read_by_the_client(caller: AsyncAnthropic) -> None:
    async with caller.messages.stream(
        model=MODEL, max_tokens=400, messages=MESSAGES, tools=TOOLS, tool_choice={"type": "any"}
    ) as stream:
        final = await stream.get_final_message()
    uses = [block for block in final.content if block.type == "tool_use"]
    assert uses
    assert all(isinstance(use.input, dict) and "unit" in use.input for use in uses)


async def test_tokens_are_counted_as_they_are_read(api: AsyncAnthropic) -> None:
    counted = await api.messages.count_tokens(model=MODEL, messages=MESSAGES)
    answer = await api.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == read


async def test_errors_have_their_own_types(assistant: Server, api: AsyncAnthropic) -> None:
    async with _api(assistant, "wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model=MODEL, max_tokens=1, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await api.messages.create(
            model=MODEL,
            max_tokens=1,
            messages=[{"role": "user", "content": "a " * 1100}],
        )
    assert "exceeds the available context size" in caught.value.message


async def test_closing_a_stream_frees_the_slot(assistant: Server, api: AsyncAnthropic) -> None:
    before = (await assistant.rpc.info()).counters.requests_cancelled
    stream = await api.messages.create(model=MODEL, max_tokens=900, messages=MESSAGES, stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await assistant.rpc.cancelled(before + 1)
    await assistant.rpc.idle()
