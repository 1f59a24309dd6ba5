"""TokenizationService: text to tokens and back, without running the model."""

from __future__ import annotations

import asyncio
import logging

import grpc
from kvarts.v1 import tokenization_pb2, tokenization_pb2_grpc

from engine.text.grammar.schema_gbnf import schema_to_gbnf
from service.bridge import Bridge
from service.json_text import parse_json
from service.loaded import Tokenizer
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
        model = await self._bridge.awake(request.ByteSize())
        tokenizer = model.tokenizer
        check_vocabulary(request.vocabulary, model)
        check_tokenize(request, tokenizer.vocab_size)
        parse_special = request.parse_special if request.HasField("parse_special") else True
        if request.WhichOneof("input") == "text":
            tokens = await encode(
                tokenizer,
                request.text,
                add_special=request.add_special,
                parse_special=parse_special,
            )
        else:
            tokens = await _encode_mixed(tokenizer, request, parse_special=parse_special)
        return await asyncio.to_thread(_answer, tokenizer, tokens, request.omit_pieces)

    async def Detokenize(
        self,
        request: DetokenizeRequest,
        context: grpc.aio.ServicerContext[DetokenizeRequest, DetokenizeResponse],
    ) -> DetokenizeResponse:
        """Turns tokens into text.

        Raises:
            EngineError: The request was refused.
        """
        tokenizer = (await self._bridge.awake(request.ByteSize())).tokenizer
        check_vocab(request.token_ids, tokenizer.vocab_size)
        render_special = request.render_special if request.HasField("render_special") else True
        if request.as_prompt:
            raw = await asyncio.to_thread(tokenizer.prompt_text, request.token_ids)
        else:
            raw = await asyncio.to_thread(
                tokenizer.decode, request.token_ids, render_special=render_special
            )
        return DetokenizeResponse(text=raw.decode("utf-8", "replace"), raw=raw)

    async def ApplyChatTemplate(
        self,
        request: TemplateRequest,
        context: grpc.aio.ServicerContext[TemplateRequest, TemplateResponse],
    ) -> TemplateResponse:
        """Renders a conversation as the prompt that Generate would run.

        Raises:
            EngineError: The request was refused.
        """
        model = await self._bridge.awake(request.ByteSize())
        check_template(request)
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


async def _encode_mixed(
    tokenizer: Tokenizer, request: TokenizeRequest, *, parse_special: bool
) -> list[int]:
    """Assembles a mixed prompt; special tokens are added only at an end that is text."""
    parts = request.mixed.parts
    tokens: list[int] = []
    for part in parts:
        if part.WhichOneof("part") == "tokens":
            tokens += part.tokens.ids
        else:
            tokens += await encode(
                tokenizer, part.text, add_special=False, parse_special=parse_special
            )
    if not parts or not request.add_special:
        return tokens
    # What stands around an empty text is what stands around any.
    around = tokenizer.encode("", add_special=True, parse_special=False)
    opens_with_text = parts[0].WhichOneof("part") == "text"
    ends_with_text = parts[-1].WhichOneof("part") == "text"
    head = around[: tokenizer.add_bos] if opens_with_text else []
    tail = around[int(tokenizer.add_bos) :] if ends_with_text else []
    return [*head, *tokens, *tail]


def _answer(tokenizer: Tokenizer, tokens: list[int], omit_pieces: bool) -> TokenizeResponse:
    response = TokenizeResponse()
    # Made inside the response: a message of its own per token takes ten times the memory.
    add = response.tokens.add
    for i in tokens:
        if omit_pieces:
            add(id=i)
        else:
            add(id=i, piece=tokenizer.piece(i, render_special=True))
    return response
