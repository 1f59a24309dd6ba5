"""What a service without a model answers: a token per byte, and generations as a test writes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarts.v1 import common_pb2, generation_pb2

BOS, EOS, FIRST_BYTE = 1, 2, 3
VOCAB_SIZE = 259
CONTEXT_TOKENS = 256

Response = generation_pb2.GenerateResponse
Request = generation_pb2.GenerateRequest
Script = Callable[["Call"], AsyncIterator[Response]]


@dataclass
class Call:
    """One Generate call: what was asked, with which key, and whether it was cancelled."""

    request: Request
    key: str
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)


def encode(text: str) -> list[int]:
    """One token per byte."""
    return [byte + FIRST_BYTE for byte in text.encode()]


def decode(tokens: Sequence[int]) -> bytes:
    """The bytes of tokens; special tokens show their text."""
    special = {0: b"<unk>", BOS: b"<s>", EOS: b"</s>"}
    return b"".join(special.get(token) or bytes([token - FIRST_BYTE]) for token in tokens)


def prompt_of(request: Request) -> list[int]:
    """The tokens of a request's prompt."""
    if request.HasField("chat"):
        return [BOS, *encode(render(request.chat))]
    return list(request.tokens.ids)


def as_message(request: Request, response: Response) -> Response:
    """Tells text of a conversation's answer as content too, unless the script told something."""
    event = response.chunk if response.HasField("chunk") else response.finished
    text = response.chunk.text or response.finished.unsent_text
    if request.HasField("chat") and text and not event.chat_deltas:
        event.chat_deltas.add(content=text)
    return response


def started(call: Call, cached: int = 0) -> Response:
    """The first event."""
    num_tokens = len(prompt_of(call.request))
    return Response(
        started=generation_pb2.Started(slot_id=1, prompt_tokens=num_tokens, cached_tokens=cached)
    )


def chunk(text: str, token: int, count: int, **fields: Any) -> Response:
    """One token."""
    return Response(
        chunk=generation_pb2.Chunk(text=text, token_id=token, completion_tokens=count, **fields)
    )


def finished(call: Call, count: int, **fields: Any) -> Response:
    """The last event."""
    num_tokens = len(prompt_of(call.request))
    told: dict[str, Any] = {
        "finish_reason": generation_pb2.FINISH_REASON_LENGTH,
        "completion_tokens": count,
        "prompt_tokens": num_tokens,
        "held_tokens": num_tokens + count - 1,
    }
    if call.request.return_prompt_text:
        told["prompt_text"] = decode(prompt_of(call.request)).decode(errors="replace")
    return Response(finished=generation_pb2.Finished(**(told | fields)))


async def echo_letters(call: Call) -> AsyncIterator[Response]:
    """Answers with the letters a, b, c ... up to max_tokens (3 where it is not set)."""
    yield started(call)
    count = call.request.max_tokens if call.request.HasField("max_tokens") else 3
    for index in range(max(1, count)):
        letter = chr(ord("a") + index)
        yield chunk(letter, encode(letter)[0], index + 1)
    yield finished(call, max(1, count))


def text_script(*pieces: str, **end: Any) -> Script:
    """Answers with the given pieces, whatever was asked."""

    async def script(call: Call) -> AsyncIterator[Response]:
        yield started(call)
        for index, piece in enumerate(pieces):
            yield chunk(piece, index + FIRST_BYTE, index + 1)
        yield finished(call, len(pieces), **end)

    return script


def render(chat: common_pb2.ChatPrompt) -> str:
    """ChatML, a continued last message left open."""
    continued = chat.final_message == common_pb2.FINAL_MESSAGE_CONTINUED
    text = ""
    for index, message in enumerate(chat.messages):
        content = message.content or "\n".join(part.text for part in message.parts.parts)
        is_open = continued and index == len(chat.messages) - 1
        text += f"<{message.role}>{content}" + ("" if is_open else "</>")
    return text + ("<assistant>" if chat.add_generation_prompt else "")
