"""The routes around the tokenizer and the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from kvarts.v1 import tokenization_pb2
from starlette.responses import Response

from gateway import anthropic_body, responses_body
from gateway.chat_routes import read_chat, render
from gateway.connection import json_response
from gateway.errors import server_fault, wrong_type
from gateway.exchange import Exchange
from gateway.fields import lenient_flag, members_of
from gateway.off_loop import extend, off_loop
from gateway.peer_json import Json
from gateway.prompts import check_vocabulary, ids_of, num_tokens, read_mixed, tokenize_request
from gateway.service import answer


async def tokenize(exchange: Exchange) -> Response:
    """POST /tokenize."""
    connection, backend = exchange.connection, exchange.backend
    body = members_of(await connection.json())
    if "content" not in body:
        return json_response({"tokens": []})
    vocab_size = backend.facts.model.vocab_size
    request = await off_loop(lambda: _request(body, vocab_size), weight=connection.body_bytes)
    call = backend.service.tokenization.Tokenize(request, metadata=backend.metadata)
    reply = await connection.while_connected(answer(call))
    return await off_loop(
        lambda: _tokens_response(reply, has_pieces=not request.omit_pieces),
        weight=num_tokens(reply),
    )


async def detokenize(exchange: Exchange) -> Response:
    """POST /detokenize; an id outside the vocabulary is the peer's 500."""
    body = members_of(await exchange.connection.json())
    if "tokens" not in body:
        return json_response({"content": ""})
    backend, connection = exchange.backend, exchange.connection
    request = await off_loop(
        lambda: _detokenize_request(body["tokens"], backend.facts.model.vocab_size),
        weight=connection.body_bytes,
    )
    call = backend.service.tokenization.Detokenize(request, metadata=backend.metadata)
    reply = await exchange.connection.while_connected(answer(call))
    return await off_loop(
        lambda: json_response({"content": reply.text}), weight=connection.body_bytes
    )


async def apply_template(exchange: Exchange) -> Response:
    """POST /apply-template."""
    rendered = await _rendered(exchange, members_of)
    return json_response({"prompt": rendered.prompt})


async def count_chat_tokens(exchange: Exchange) -> Response:
    """POST /chat/completions/input_tokens."""
    rendered = await _rendered(exchange, members_of)
    return json_response(
        {"input_tokens": rendered.prompt_tokens, "object": "response.input_tokens"}
    )


async def count_response_tokens(exchange: Exchange) -> Response:
    """POST /responses/input_tokens."""
    rendered = await _rendered(exchange, responses_body.to_chat_body)
    return json_response(
        {"input_tokens": rendered.prompt_tokens, "object": "response.input_tokens"}
    )


async def count_message_tokens(exchange: Exchange) -> Response:
    """POST /v1/messages/count_tokens."""
    rendered = await _rendered(exchange, anthropic_body.to_chat_body)
    return json_response({"input_tokens": rendered.prompt_tokens})


async def _rendered(
    exchange: Exchange, to_chat_body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> tokenization_pb2.ApplyChatTemplateResponse:
    read = await read_chat(exchange, to_chat_body)
    return await exchange.connection.while_connected(render(exchange.backend, read.chat))


def _request(body: Mapping[str, Any], vocab_size: int) -> tokenization_pb2.TokenizeRequest:
    try:
        prompt = read_mixed(body["content"])
    except ValueError as error:
        raise server_fault(str(error)) from error
    check_vocabulary([prompt], vocab_size)
    return tokenize_request(
        prompt,
        add_special=lenient_flag(body.get("add_special"), False),
        parse_special=lenient_flag(body.get("parse_special"), True),
        has_pieces=lenient_flag(body.get("with_pieces"), False),
    )


def _tokens_response(reply: tokenization_pb2.TokenizeResponse, *, has_pieces: bool) -> Response:
    if not has_pieces:
        return json_response({"tokens": ids_of(reply)})
    tokens: list[Json] = [{"id": t.id, "piece": _piece(t.piece)} for t in reply.tokens]
    return json_response({"tokens": tokens})


def _piece(piece: bytes) -> Json:
    """Text, or a list of bytes where the piece is no whole text."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _detokenize_request(value: Any, vocab_size: int) -> tokenization_pb2.DetokenizeRequest:
    request = tokenization_pb2.DetokenizeRequest(render_special=True)
    extend(request.token_ids, _token_ids(value, vocab_size))
    return request


def _token_ids(value: Any, vocab_size: int) -> list[int]:
    if not isinstance(value, list):
        raise server_fault(wrong_type("array", value))
    tokens: list[int] = []
    for item in cast("list[Any]", value):
        if not isinstance(item, int | float):
            raise server_fault(wrong_type("number", item))
        token = int(item)
        if not 0 <= token < vocab_size:
            raise server_fault(f"token {token} is outside the vocabulary of {vocab_size} tokens")
        tokens.append(token)
    return tokens
