"""TokenizationService: text to tokens and back, without running the model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc
from kvarts.v1 import tokenization_pb2, tokenization_pb2_grpc

from engine.errors import InvalidField
from engine.text.grammar.schema_gbnf import schema_to_gbnf
from service import telemetry
from service.bridge import Bridge
from service.json_text import parse_json
from service.loaded import Tokenizer
from service.off_loop import extend, in_pieces, off_loop
from service.prompt import encode, render
from service.validate import check_template, check_tokenize, check_vocab, check_vocabulary

TokenizeRequest = tokenization_pb2.TokenizeRequest
TokenizeResponse = tokenization_pb2.TokenizeResponse
DetokenizeRequest = tokenization_pb2.DetokenizeRequest
DetokenizeResponse = tokenization_pb2.DetokenizeResponse
TemplateRequest = tokenization_pb2.ApplyChatTemplateRequest
TemplateResponse = tokenization_pb2.ApplyChatTemplateResponse
SchemaRequest = tokenization_pb2.ConvertJsonSchemaRequest
SchemaResponse = tokenization_pb2.ConvertJsonSchemaResponse

# A token may be two bytes on the wire and many as text.
MAX_TEXT_BYTES = 32 << 20

_LOG = logging.getLogger(__name__)


class TokenizationServicer(tokenization_pb2_grpc.TokenizationServiceServicer):
    """Speaks for the model's tokenizer and chat template."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    async def Tokenize(
        self,
        request: TokenizeRequest,
        context: grpc.aio.ServicerContext[TokenizeRequest, TokenizeResponse],
    ) -> TokenizeResponse:
        """Turns text, or a mixed prompt, into tokens.

        Raises:
            EngineError: The request was refused.
        """
        size = telemetry.current().request_bytes
        model = await self._bridge.awake(size)
        check_vocabulary(request.vocabulary, model)
        return await off_loop(lambda: _tokenized(model.tokenizer, request), weight=size)

    async def Detokenize(
        self,
        request: DetokenizeRequest,
        context: grpc.aio.ServicerContext[DetokenizeRequest, DetokenizeResponse],
    ) -> DetokenizeResponse:
        """Turns tokens into text.

        Raises:
            EngineError: The request was refused.
        """
        size = telemetry.current().request_bytes
        tokenizer = (await self._bridge.awake(size)).tokenizer
        return await off_loop(lambda: _detokenized(tokenizer, request), weight=size)

    async def ApplyChatTemplate(
        self,
        request: TemplateRequest,
        context: grpc.aio.ServicerContext[TemplateRequest, TemplateResponse],
    ) -> TemplateResponse:
        """Renders a conversation as the prompt that Generate would run.

        Raises:
            EngineError: The request was refused.
        """
        record = telemetry.current()
        model = await self._bridge.awake(record.request_bytes)
        await off_loop(lambda: check_template(request), weight=record.weight)
        rendered = await render(request.chat, model)
        tokens = await encode(model.tokenizer, rendered.text)
        return TemplateResponse(prompt=rendered.text, prompt_tokens=len(tokens))

    async def ConvertJsonSchema(
        self,
        request: SchemaRequest,
        context: grpc.aio.ServicerContext[SchemaRequest, SchemaResponse],
    ) -> SchemaResponse:
        """Writes a JSON schema as a grammar, passing over what a grammar cannot express.

        Raises:
            EngineError: The request was refused.
        """
        return await asyncio.to_thread(_convert_schema, request.json_schema)


def _convert_schema(text: str) -> SchemaResponse:
    converted = schema_to_gbnf(parse_json(text, "json_schema"))
    ignored = [str(entry) for entry in converted.ignored]
    if ignored:
        _LOG.warning("a JSON schema's keywords are not honoured: %s", "; ".join(ignored[:10]))
    return SchemaResponse(grammar=converted.grammar, ignored=ignored)


def _tokenized(tokenizer: Tokenizer, request: TokenizeRequest) -> TokenizeResponse:
    check_tokenize(request, tokenizer.vocab_size)
    parse_special = request.parse_special if request.HasField("parse_special") else True
    if request.WhichOneof("input") == "text":
        tokens = tokenizer.encode(
            request.text, add_special=request.add_special, parse_special=parse_special
        )
    else:
        tokens = _encode_mixed(tokenizer, request, parse_special=parse_special)
    return _answer(tokenizer, tokens, request)


def _encode_mixed(
    tokenizer: Tokenizer, request: TokenizeRequest, *, parse_special: bool
) -> list[int]:
    """Assembles a mixed prompt; special tokens are added only at an end that is text."""
    parts = request.mixed.parts
    tokens: list[int] = []
    for part in parts:
        if part.WhichOneof("part") == "tokens":
            for piece in in_pieces(part.tokens.ids):
                tokens += piece
        else:
            tokens += tokenizer.encode(part.text, add_special=False, parse_special=parse_special)
    if not parts or not request.add_special:
        return tokens
    # What stands around an empty text is what stands around any.
    around = tokenizer.encode("", add_special=True, parse_special=False)
    opens_with_text = parts[0].WhichOneof("part") == "text"
    ends_with_text = parts[-1].WhichOneof("part") == "text"
    head = around[: tokenizer.add_bos] if opens_with_text else []
    tail = around[int(tokenizer.add_bos) :] if ends_with_text else []
    return [*head, *tokens, *tail]


def _answer(
    tokenizer: Tokenizer, tokens: Sequence[int], request: TokenizeRequest
) -> TokenizeResponse:
    response = TokenizeResponse()
    if request.ids_only:
        extend(response.ids, tokens)
        return response
    # Made inside the response: a message of its own per token takes ten times the memory.
    add = response.tokens.add
    for i in tokens:
        if request.omit_pieces:
            add(id=i)
        else:
            add(id=i, piece=tokenizer.piece(i, render_special=True))
    return response


def _detokenized(tokenizer: Tokenizer, request: DetokenizeRequest) -> DetokenizeResponse:
    render_special = request.render_special if request.HasField("render_special") else True
    ids, parts, size = request.token_ids, list[bytes](), 0
    for piece in in_pieces(ids):
        check_vocab(piece, tokenizer.vocab_size)
        parts.append(tokenizer.decode(piece, render_special=render_special))
        size += len(parts[-1])
        if size > MAX_TEXT_BYTES:
            raise InvalidField(
                "token_ids", f"the text of {len(ids)} tokens is over {MAX_TEXT_BYTES} bytes"
            )
    raw = tokenizer.prompt_text(ids) if request.as_prompt else b"".join(parts)
    return DetokenizeResponse(text=raw.decode("utf-8", "replace"), raw=raw)
