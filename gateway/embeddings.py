"""POST /embeddings: texts as vectors, in llama-server's own form and in OpenAI's."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvarts.v1 import common_pb2, embedding_pb2
from starlette.responses import Response

from gateway.backend import Backend
from gateway.connection import json_response
from gateway.errors import ApiError, ErrorKind, invalid, not_supported, server_fault, wrong_type
from gateway.exchange import Exchange
from gateway.fields import INT32_MAX, members_of
from gateway.off_loop import extend, off_loop
from gateway.peer_json import Json
from gateway.prompts import Prompt, check_vocabulary, read_prompt, tokenize_all
from gateway.service import answer

MAX_INPUTS = 2048
# A reply of the service has 4 MiB at most; each vector has a few bytes beside its numbers.
_MAX_REPLY_BYTES = 4_000_000
# A call of the service may have 16 MiB.
_MAX_REQUEST_BYTES = 4 << 20
_FLOAT_BYTES = 4
_DISABLED = "This server does not support embeddings. Start it with `--embeddings`"
_NOT_POOLED = "Pooling type 'none' is not OAI compatible. Please use a different pooling type"
_FORMATS = "The format to return the embeddings in. Can be either float or base64"


@dataclass(frozen=True)
class _Asked:
    """What a body asks for. `norm` None is the server's own."""

    prompts: Sequence[Prompt]
    norm: int | None
    is_native: bool
    is_base64: bool
    model: str


async def embed_natively(exchange: Exchange) -> Response:
    """POST /embedding."""
    return await _embed(exchange, is_native=True)


async def embed(exchange: Exchange) -> Response:
    """POST /v1/embeddings; `content` in place of `input` asks for the native answer."""
    return await _embed(exchange, is_native=False)


async def embeddings_of(
    backend: Backend,
    inputs: Iterable[embedding_pb2.EmbedInput],
    *,
    rows: Sequence[int],
    norm: int | None = None,
    weight: int = 0,
) -> list[embedding_pb2.Embedding]:
    """Embeds inputs in as few calls as they and their replies allow.

    Args:
        backend: Where the calls go.
        inputs: As many as `rows`, each read when its call is made.
        rows: The vectors that each comes to.
        norm: See `Embed`; None is the server's own.
        weight: What making the inputs of a call takes; see `off_loop`.

    Raises:
        ApiError: the service refused a call or is gone.
    """
    results: list[embedding_pb2.Embedding] = []
    row_bytes = _FLOAT_BYTES * max(1, backend.facts.model.embedding_size)
    batches = _batches(inputs, rows, _MAX_REPLY_BYTES // row_bytes)
    while batch := await off_loop(lambda: next(batches, None), weight=weight):
        request = embedding_pb2.EmbedRequest(inputs=batch, vocabulary=backend.vocabulary)
        if norm is not None:
            request.norm = norm
        call = backend.service.embedding.Embed(request, metadata=backend.metadata)
        results += (await answer(call)).embeddings
    return results


def _batches(
    inputs: Iterable[embedding_pb2.EmbedInput], rows: Sequence[int], most_rows: int
) -> Iterator[list[embedding_pb2.EmbedInput]]:
    batch: list[embedding_pb2.EmbedInput] = []
    num_rows = num_bytes = 0
    for given, own in zip(inputs, rows, strict=True):
        size = given.ByteSize()
        is_full = num_rows + own > most_rows or num_bytes + size > _MAX_REQUEST_BYTES
        if batch and (is_full or len(batch) == MAX_INPUTS):
            yield batch
            batch, num_rows, num_bytes = [], 0, 0
        batch.append(given)
        num_rows += own
        num_bytes += size
    yield batch


async def _embed(exchange: Exchange, *, is_native: bool) -> Response:
    connection, backend = exchange.connection, exchange.backend
    if not backend.facts.info.features.embedding:
        await connection.body()
        raise not_supported(_DISABLED)
    is_pooled = backend.facts.model.pooling != embedding_pb2.POOLING_NONE
    body = members_of(await connection.json())
    if not is_native and not is_pooled:
        raise invalid(_NOT_POOLED)
    asked = await off_loop(
        lambda: _read(body, backend, is_native=is_native), weight=connection.body_bytes
    )
    results = await connection.while_connected(_results(backend, asked, is_pooled=is_pooled))
    num_floats = sum(len(result.values) for result in results)
    return await off_loop(lambda: json_response(_answer(asked, results)), weight=16 * num_floats)


async def _results(
    backend: Backend, asked: _Asked, *, is_pooled: bool
) -> list[embedding_pb2.Embedding]:
    tokens = await tokenize_all(backend, asked.prompts)
    if any(not ids for ids in tokens):
        raise invalid("Input content cannot be empty")
    inputs = await off_loop(
        lambda: [_input(ids) for ids in tokens], weight=sum(len(ids) for ids in tokens)
    )
    rows = [1 if is_pooled else len(ids) for ids in tokens]
    return await embeddings_of(backend, inputs, rows=rows, norm=asked.norm)


def _input(ids: Sequence[int]) -> embedding_pb2.EmbedInput:
    message = embedding_pb2.EmbedInput(tokens=common_pb2.TokenIds())
    extend(message.tokens.ids, ids)
    return message


def _read(body: Mapping[str, Any], backend: Backend, *, is_native: bool) -> _Asked:
    if "input" in body:
        given = body["input"]
    elif "content" in body:
        given, is_native = body["content"], True
    else:
        raise invalid('"input" or "content" must be provided')
    is_base64 = _read_format(body)
    prompts = _read_inputs(given)
    check_vocabulary(prompts, backend.facts.model.vocab_size)
    model = body.get("model")
    return _Asked(
        prompts=prompts,
        norm=_read_norm(body),
        is_native=is_native,
        is_base64=is_base64,
        model=model if isinstance(model, str) else backend.facts.name,
    )


def _read_format(body: Mapping[str, Any]) -> bool:
    wanted = body.get("encoding_format", "float")
    if not isinstance(wanted, str):
        raise server_fault(wrong_type("string", wanted))
    if wanted not in ("float", "base64"):
        raise invalid(_FORMATS)
    return wanted == "base64"


def _read_norm(body: Mapping[str, Any]) -> int | None:
    if "embd_normalize" not in body:
        return None
    norm = body["embd_normalize"]
    if not isinstance(norm, int | float):
        raise server_fault(wrong_type("number", norm))
    if not -1 <= norm <= INT32_MAX:
        raise invalid(f'"embd_normalize" must be in [-1, {INT32_MAX}], got {norm}')
    return int(norm)


def _read_inputs(given: Any) -> list[Prompt]:
    """One input or a batch, in the shapes of a prompt or as pieces of OpenAI content."""
    if not isinstance(given, list):
        return [_read_input(given)]
    items = cast("list[Any]", given)
    if any(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [_read_input(items)]
    if not items:
        raise invalid('"input" must not be empty')
    if len(items) > MAX_INPUTS:
        raise invalid(f'"input" has {len(items)} inputs, the limit is {MAX_INPUTS}')
    return [_read_input(item) for item in items]


def _read_input(given: Any) -> Prompt:
    if isinstance(given, Mapping) and "content" in given:
        return _read_content(cast("Mapping[str, Any]", given)["content"])
    try:
        return read_prompt(given)
    except ApiError as error:
        # The peer answers 500 to shapes here that it answers 400 to elsewhere.
        raise ApiError(ErrorKind.SERVER, error.body.message) from error


def _read_content(content: Any) -> Prompt:
    if not isinstance(content, list):
        raise invalid("content must be an array")
    texts: list[str] = []
    for part in cast("list[Any]", content):
        members = members_of(part)
        if members.get("type") != "text" or not isinstance(members.get("text"), str):
            raise invalid('"content" parts must be {"type": "text", "text": string}')
        texts.append(members["text"])
    return Prompt(("".join(texts),))


def _answer(asked: _Asked, results: Sequence[embedding_pb2.Embedding]) -> Json:
    if asked.is_native:
        return [
            {"index": index, "embedding": _rows(result)} for index, result in enumerate(results)
        ]
    num_tokens = sum(result.prompt_tokens for result in results)
    return {
        "model": asked.model,
        "object": "list",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "data": [
            _item(index, result, is_base64=asked.is_base64) for index, result in enumerate(results)
        ],
    }


def _rows(result: embedding_pb2.Embedding) -> list[Json]:
    values, width = list(result.values), result.dimension
    return [values[first : first + width] for first in range(0, len(values), max(1, width))]


def _item(index: int, result: embedding_pb2.Embedding, *, is_base64: bool) -> Json:
    values = list(result.values)
    if not is_base64:
        return {"embedding": values, "index": index, "object": "embedding"}
    packed = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return {
        "embedding": packed,
        "index": index,
        "object": "embedding",
        "encoding_format": "base64",
    }
