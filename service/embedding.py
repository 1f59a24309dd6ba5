"""EmbeddingService: texts in, vectors out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import grpc
import numpy as np
from kvarts.v1 import embedding_pb2, embedding_pb2_grpc

from engine.errors import InvalidField, NotSupported
from engine.pooling import normalised
from engine.requests import Pooling, Request
from engine.types import Embedded, Started
from service import convert, telemetry
from service.bridge import Bridge
from service.deadline import CallDeadline
from service.loaded import LoadedModel
from service.off_loop import off_loop
from service.poolings import POOLINGS, WIRE_POOLINGS
from service.prompt import ids_of
from service.validate import check_embed, check_vocabulary, limits_of

EmbedRequest = embedding_pb2.EmbedRequest
EmbedResponse = embedding_pb2.EmbedResponse

# A reply's bound, which gRPC clients have by default.
MAX_REPLY_BYTES = 4 << 20
_FLOAT_BYTES = 4
# Beside the numbers of a vector: its own fields.
_ENTRY_BYTES = 32


@dataclass(frozen=True)
class _Plan:
    """How a checked request is served."""

    pooling: Pooling
    norm: int
    inputs: Sequence[Sequence[int]]


class EmbeddingServicer(embedding_pb2_grpc.EmbeddingServiceServicer):
    """Pools the hidden states of texts."""

    def __init__(self, bridge: Bridge, clock: Callable[[], float] = time.monotonic) -> None:
        self._bridge = bridge
        self._clock = clock

    async def Embed(
        self,
        request: EmbedRequest,
        context: grpc.aio.ServicerContext[EmbedRequest, EmbedResponse],
    ) -> EmbedResponse:
        """Embeds every input; an encoder takes several in a step, a decoder one after another.

        Raises:
            EngineError: The request was refused or failed.
        """
        begun_s = self._clock()
        async with self._bridge.admit(telemetry.current().request_bytes) as model:
            deadline = CallDeadline.of(context)
            # The stub promises a float; a call without a deadline answers None.
            remaining_s = cast("float | None", context.time_remaining())
            deadline_s = None if remaining_s is None else model.engine.now_s() + remaining_s
            check_vocabulary(request.vocabulary, model)
            record = telemetry.current()
            plan = await off_loop(lambda: _plan(request, model), weight=record.request_bytes)
            record.trace.operation, record.trace.model = "embeddings", model.names.model_id
            record.trace.mark("queue")
            requests = [
                Request(
                    request_id=f"{record.request_id}-{index}" if index else record.request_id,
                    prompt=tuple(tokens),
                    pooling=plan.pooling,
                    cache_prompt=False,
                    adapters=(
                        convert.to_adapters(request.adapters)
                        if request.HasField("adapters")
                        else None
                    ),
                    deadline_s=deadline_s,
                    tenant=record.tenant,
                    group=record.request_id,
                )
                for index, tokens in enumerate(plan.inputs)
            ]
            found: dict[int, Embedded] = {}
            async with aclosing(
                self._bridge.events(requests, deadline.cause, model=model)
            ) as events:
                async for sample, event in events:
                    if isinstance(event, Started):
                        record.trace.mark("prefill")
                        record.slot_id = event.slot_id
                    if isinstance(event, Embedded):
                        found[sample] = event
        record.prompt_tokens = sum(event.prompt_tokens for event in found.values())
        return EmbedResponse(
            embeddings=[_embedding(found[index], plan) for index in range(len(requests))],
            prompt_tokens=record.prompt_tokens,
            pooling=WIRE_POOLINGS[plan.pooling],
            elapsed=convert.to_duration(self._clock() - begun_s),
        )


def _plan(request: EmbedRequest, model: LoadedModel) -> _Plan:
    check_embed(request, limits_of(model))
    embedding = model.embedding
    if embedding is None:
        raise NotSupported("embeddings: the server was not started for them")
    pooling = embedding.pooling
    if request.pooling != embedding_pb2.POOLING_UNSPECIFIED:
        pooling = POOLINGS[request.pooling]
    inputs: list[Sequence[int]] = []
    for index, entry in enumerate(request.inputs):
        inputs.append(_tokens(entry, index, model, pooling))
    _check_reply(inputs, pooling, model.facts.embedding_size)
    norm = request.norm if request.HasField("norm") else embedding.norm
    return _Plan(pooling, norm, inputs)


def _tokens(
    entry: embedding_pb2.EmbedInput, index: int, model: LoadedModel, pooling: Pooling
) -> Sequence[int]:
    match entry.WhichOneof("input"):
        case "tokens":
            tokens: Sequence[int] = ids_of(entry.tokens.ids)
        case "pair":
            if pooling is not Pooling.RANK:
                raise InvalidField(f"inputs[{index}]", "a pair, which needs RANK pooling")
            tokens = _pair_tokens(entry.pair, model)
        case _:
            tokens = model.tokenizer.encode(entry.text, add_special=True, parse_special=True)
    if not tokens:
        raise InvalidField(f"inputs[{index}]", "has no tokens")
    return tokens


def _pair_tokens(pair: embedding_pb2.RankPair, model: LoadedModel) -> Sequence[int]:
    layout, tokenizer = model.pairs, model.tokenizer
    if (text := layout.filled(pair.query, pair.document)) is not None:
        return tokenizer.encode(text, add_special=False, parse_special=True)
    query, document = [
        tokenizer.encode(text, add_special=False, parse_special=False)
        for text in (pair.query, pair.document)
    ]
    return [*layout.before, *query, *layout.between, *document, *layout.behind]


def _check_reply(inputs: Sequence[Sequence[int]], pooling: Pooling, width: int) -> None:
    rows = sum(len(tokens) for tokens in inputs) if pooling is Pooling.NONE else len(inputs)
    size = rows * width * _FLOAT_BYTES + len(inputs) * _ENTRY_BYTES
    if size > MAX_REPLY_BYTES:
        raise InvalidField(
            "inputs",
            f"{rows} rows of {width} numbers would make a reply of {size} bytes, the limit is "
            f"{MAX_REPLY_BYTES}",
        )


def _embedding(event: Embedded, plan: _Plan) -> embedding_pb2.Embedding:
    values = np.frombuffer(event.values, "<f4")
    if plan.pooling not in (Pooling.NONE, Pooling.RANK):
        values = normalised(values, plan.norm)
    return embedding_pb2.Embedding(
        values=values.tolist(),
        dimension=event.dimension,
        num_rows=event.num_rows,
        prompt_tokens=event.prompt_tokens,
    )
