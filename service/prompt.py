"""A request's prompt as token ids, whichever way it was given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvarts.v1 import common_pb2, generation_pb2, slot_pb2

from service.chat import RenderedChat, render_chat
from service.loaded import LoadedModel, Tokenizer

# Texts up to this long are tokenised on the event loop, in well under a millisecond.
_SHORT_CHARS = 1024


@dataclass(frozen=True)
class Prompt:
    """Token ids; `chat` is the conversation that they came from, None for other prompts."""

    tokens: Sequence[int]
    chat: RenderedChat | None = None


async def read_prompt(
    message: generation_pb2.GenerateRequest | slot_pb2.SaveSlotRequest, model: LoadedModel
) -> Prompt:
    """Tokenises what a checked request brings; texts recognise special tokens and get a BOS.

    Raises:
        EngineError: As `render`.
    """
    match message.WhichOneof("prompt"):
        case "tokens":
            return Prompt(message.tokens.ids)
        case "chat":
            chat = await render(message.chat, model)
            return Prompt(await encode(model.tokenizer, chat.text), chat)
        case _:
            return Prompt(await encode(model.tokenizer, message.text))


async def render(chat: common_pb2.ChatPrompt, model: LoadedModel) -> RenderedChat:
    """Renders a conversation on a thread: a template is a program that the loop must not wait for.

    Raises:
        EngineError: As `render_chat`.
    """
    return await asyncio.to_thread(
        render_chat, chat, model.template, model.defaults, "chat", model.chat_format
    )


async def encode(
    tokenizer: Tokenizer, text: str, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Tokenises a text, a long one on a thread."""
    if len(text) <= _SHORT_CHARS:
        return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
    return await asyncio.to_thread(
        tokenizer.encode, text, add_special=add_special, parse_special=parse_special
    )
