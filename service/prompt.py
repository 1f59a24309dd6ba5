"""A request's prompt as token ids, whichever way it was given."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from kvarts.v1 import common_pb2, generation_pb2, slot_pb2

from engine.errors import ContextOverflow
from service import telemetry
from service.chat import RenderedChat, render_chat
from service.loaded import LoadedModel, Tokenizer
from service.off_loop import in_pieces, off_loop, on_thread
from service.validate import limits_of


@dataclass(frozen=True)
class Prompt:
    """Token ids; `chat` is the conversation that they came from, None for other prompts.

    Of a prompt of `num_tokens` that no context holds, `tokens` is as much as shows that.
    """

    tokens: Sequence[int]
    num_tokens: int
    chat: RenderedChat | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int], context_tokens: int, chat: RenderedChat | None = None
    ) -> Prompt:
        """Keeps of millions of ids what the engine refuses as well."""
        return cls(tokens[:context_tokens], len(tokens), chat)

    @contextmanager
    def counted(self) -> Generator[None]:
        """Tells the length of the whole prompt where the engine has refused it for its beginning.

        Raises:
            ContextOverflow: The block has raised it.
        """
        try:
            yield
        except ContextOverflow as error:
            raise ContextOverflow(self.num_tokens, error.context_tokens) from error


async def read_prompt(
    message: generation_pb2.GenerateRequest | slot_pb2.SaveSlotRequest, model: LoadedModel
) -> Prompt:
    """Tokenises what a checked request brings; texts recognise special tokens and get a BOS.

    Raises:
        EngineError: As `render`.
    """
    context_tokens = limits_of(model).context_tokens
    match message.WhichOneof("prompt"):
        case "tokens":
            return Prompt.of(message.tokens.ids, context_tokens)
        case "chat":
            chat = await render(message.chat, model)
            return Prompt.of(await encode(model.tokenizer, chat.text), context_tokens, chat)
        case _:
            return Prompt.of(await encode(model.tokenizer, message.text), context_tokens)


async def render(chat: common_pb2.ChatPrompt, model: LoadedModel) -> RenderedChat:
    """Renders a conversation on a thread: a template is a program that the loop must not wait for.

    Raises:
        EngineError: As `render_chat`.
    """
    return await on_thread(
        lambda: render_chat(chat, model.template, model.defaults, "chat", model.chat_format),
        weight=telemetry.current().request_bytes,
    )


def ids_of(ids: Sequence[int]) -> tuple[int, ...]:
    """The ids of a message."""
    return tuple(chain.from_iterable(in_pieces(ids)))


async def encode(
    tokenizer: Tokenizer, text: str, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Tokenises a text, a long one off the loop."""
    return await off_loop(
        lambda: tokenizer.encode(text, add_special=add_special, parse_special=parse_special),
        weight=len(text),
    )
