"""The official `openai` client: tools, schemas, embeddings, and errors of a server that cannot."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.e2e.conftest import CALL_TOKEN, KEY, Server

pytestmark = pytest.mark.slow

MODEL = "any"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "how warm is it?"}]
CALL = {str(CALL_TOKEN): 100}
PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
    "required": ["unit"],
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "warmth", "parameters": PARAMETERS}}
]


@pytest.fixture
async def api(assistant: Server) -> AsyncGenerator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{assistant.url}/v1", api_key=KEY, max_retries=0, timeout=120
    ) as api:
        yield api


async def test_a_required_tool_is_called_with_what_its_schema_allows(api: AsyncOpenAI) -> None:
    answer = await api.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        logit_bias=CALL,
        max_tokens=400,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "warmth"
        assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")


async def test_streamed_calls_add_up_to_the_answer(api: AsyncOpenAI) -> None:
    asked = {"temperature": 0.0, "max_tokens": 400, "logit_bias": CALL}
    whole = await api.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", extra_body=asked
    )
    stream = await api.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        stream=True,
        extra_body=asked,
    )
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    reasons: list[str] = []
    async for chunk in stream:
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for part in choice.delta.tool_calls or ():
                assert part.function is not None
                names[part.index] = names.get(part.index, "") + (part.function.name or "")
                added = part.function.arguments or ""
                arguments[part.index] = arguments.get(part.index, "") + added
    assert reasons == ["tool_calls"]
    calls = whole.choices[0].message.tool_calls or []
    expected = [(c.function.name, c.function.arguments) for c in calls if c.type == "function"]
    assert [(names[i], arguments[i]) for i in sorted(names)] == expected


class Weather(BaseModel):
    """An answer's shape."""

    place: bool
    warmth: int


async def test_an_answer_has_the_shape_of_its_schema(api: AsyncOpenAI) -> None:
    answer = await api.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


async def test_responses_are_events_and_one_answer(api: AsyncOpenAI) -> None:
    asked = {"temperature": 0.0}
    whole = await api.responses.create(
        model=MODEL, input="a day", max_output_tokens=8, extra_body=asked
    )
    assert whole.output_text
    stream = await api.responses.create(
        model=MODEL, input="a day", max_output_tokens=8, stream=True, extra_body=asked
    )
    text = ""
    async for event in stream:
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text


async def test_embeddings_are_unit_vectors_in_both_encodings(api: AsyncOpenAI) -> None:
    texts = ["a little day", "they had so very big"]
    # The client asks for base64 by itself and decodes it.
    decoded = await api.embeddings.create(model=MODEL, input=texts)
    plain = await api.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    raw = await api.embeddings.with_raw_response.create(
        model=MODEL, input=texts[0], encoding_format="base64"
    )
    for one, other in zip(decoded.data, plain.data, strict=True):
        assert np.allclose(one.embedding, other.embedding)
        assert np.linalg.norm(other.embedding) == pytest.approx(1, abs=1e-5)
    text = json.loads(raw.text)["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), decoded.data[0].embedding)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0


async def test_what_is_not_there_has_its_own_errors(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("nothing")
    with pytest.raises(openai.InternalServerError) as caught:
        await api.audio.transcriptions.create(model=MODEL, file=("a.wav", b"RIFF"))
    assert caught.value.status_code == 501
    with pytest.raises(openai.BadRequestError, match="grammar"):
        await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, extra_body={"grammar": "root ::= "}
        )
