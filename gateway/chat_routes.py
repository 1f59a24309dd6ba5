"""The course of a chat request: its template is rendered, the rest is a completion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvarts.v1 import common_pb2, tokenization_pb2
from starlette.responses import Response

from gateway import anthropic_body, responses_body
from gateway.anthropic import MessagesDialect
from gateway.backend import Backend
from gateway.chat_body import ChatBody, ChatServer, read_chat_body, without_generation_prompt
from gateway.completion import complete
from gateway.exchange import Exchange
from gateway.fields import lenient_flag, members_of
from gateway.off_loop import off_loop
from gateway.openai_chat import ChatDialect
from gateway.options import GatewayOptions
from gateway.responses import ResponsesDialect
from gateway.service import answer
from gateway.sse import EventStream

# The peer's name for the parser of a template whose output is plain text.
_CHAT_FORMAT = "peg-native"


async def chat_completions(exchange: Exchange) -> Response | EventStream:
    """POST /v1/chat/completions."""
    read = await read_chat(exchange, members_of)
    is_verbose = lenient_flag(read.fields.get("verbose"), exchange.options.is_verbose)
    fields, backend = await exchange.connection.while_connected(
        _prompted(exchange, read, is_verbose=is_verbose)
    )
    dialect = ChatDialect(
        backend.facts,
        prefill=read.prefill,
        is_prefill_streamed=read.is_prefill_echoed,
        is_verbose=is_verbose,
    )
    return await complete(exchange.connection, backend, fields, dialect, read.chat)


async def messages(exchange: Exchange) -> Response | EventStream:
    """POST /v1/messages."""
    read = await read_chat(exchange, anthropic_body.to_chat_body)
    fields, backend = await exchange.connection.while_connected(
        _prompted(exchange, read, is_verbose=False)
    )
    dialect = MessagesDialect(backend.facts, prefill=read.prefill)
    return await complete(exchange.connection, backend, fields, dialect, read.chat)


async def responses(exchange: Exchange) -> Response | EventStream:
    """POST /v1/responses."""
    read = await read_chat(exchange, responses_body.to_chat_body)
    fields, backend = await exchange.connection.while_connected(
        _prompted(exchange, read, is_verbose=False)
    )
    dialect = ResponsesDialect(backend.facts, prefill=read.prefill)
    return await complete(exchange.connection, backend, fields, dialect, read.chat)


async def read_chat(
    exchange: Exchange, to_chat_body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> ChatBody:
    """Reads a chat body of any dialect; `to_chat_body` puts it in the form of chat completions.

    Raises:
        ApiError: it is refused.
    """
    body = await exchange.connection.json()
    return await off_loop(
        lambda: read_chat_body(to_chat_body(members_of(body)), chat_server(exchange.options)),
        weight=exchange.connection.body_bytes,
    )


def chat_server(options: GatewayOptions) -> ChatServer:
    """What chat needs to know of the flags."""
    return ChatServer(
        use_jinja=options.use_jinja,
        prefill_assistant=options.prefill_assistant,
        template_kwargs=options.chat_template_kwargs,
    )


async def render(
    backend: Backend, chat: common_pb2.ChatPrompt
) -> tokenization_pb2.ApplyChatTemplateResponse:
    """Renders a conversation.

    Raises:
        ApiError: the template fails on it, or the model has none.
    """
    request = tokenization_pb2.ApplyChatTemplateRequest(chat=chat)
    call = backend.service.tokenization.ApplyChatTemplate(request, metadata=backend.metadata)
    return await answer(call)


async def _prompted(
    exchange: Exchange, read: ChatBody, *, is_verbose: bool
) -> tuple[dict[str, Any], Backend]:
    """The completion's body, and a backend whose defaults show the chat in the settings."""
    backend = exchange.backend
    prompt = (await render(backend, read.chat)).prompt
    defaults = backend.facts.defaults
    if exchange.options.use_jinja:
        opening = ""
        # Only a verbose answer shows it, and it costs a second rendering.
        if is_verbose:
            before = (await render(backend, without_generation_prompt(read.chat))).prompt
            opening = prompt[len(before) :] if prompt.startswith(before) else ""
        defaults = dataclasses.replace(
            defaults, chat_format=_CHAT_FORMAT, generation_prompt=opening
        )
    facts = dataclasses.replace(backend.facts, defaults=defaults)
    return read.fields | {"prompt": prompt}, dataclasses.replace(backend, facts=facts)
