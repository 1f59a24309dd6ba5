"""EmbeddingService over the fake device, whose states are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from kvarts.v1 import common_pb2, embedding_pb2, model_pb2

from engine.requests import Pooling
from service.defaults import EmbeddingDefaults
from tests.contract.serving import CONFIG, Serving, failure, serving

Code = grpc.StatusCode
EmbedRequest = embedding_pb2.EmbedRequest
EmbedInput = embedding_pb2.EmbedInput
MEAN = EmbeddingDefaults(Pooling.MEAN)


def embedding(**changes: Any) -> Any:
    return serving(
        config=replace(CONFIG, embeds=True, chunk_tokens=64), model={"embedding": MEAN, **changes}
    )


def ids(*tokens: int) -> EmbedInput:
    return EmbedInput(tokens=common_pb2.TokenIds(ids=tokens))


async def _values(it: Serving, request: EmbedRequest) -> list[np.ndarray]:
    reply = await it.embedding.Embed(request)
    return [np.array(e.values).reshape(e.num_rows, e.dimension) for e in reply.embeddings]


async def test_each_input_has_a_vector_in_order() -> None:
    async with embedding() as it:
        request = EmbedRequest(inputs=[ids(5), ids(7, 9)], norm=-1)
        first, second = await _values(it, request)
        # The token, its position and one, of which the mean is taken.
        assert np.allclose(first, [[5, 0, 1]])
        assert np.allclose(second, [[8, 0.5, 1]])
        reply = await it.embedding.Embed(request)
        assert reply.prompt_tokens == 3
        assert reply.pooling == embedding_pb2.POOLING_MEAN
        assert [entry.prompt_tokens for entry in reply.embeddings] == [1, 2]


async def test_a_request_names_its_pooling_and_norm() -> None:
    async with embedding() as it:
        request = EmbedRequest(inputs=[ids(3, 4)], pooling=embedding_pb2.POOLING_LAST)
        (vector,) = await _values(it, request)
        assert np.allclose(vector, np.array([[4, 1, 1]]) / np.sqrt(18))
        request.pooling = embedding_pb2.POOLING_NONE
        (rows,) = await _values(it, request)
        assert np.allclose(rows, [[3, 0, 1], [4, 1, 1]])


async def test_a_text_has_what_encoding_adds() -> None:
    async with embedding() as it:
        reply = await it.embedding.Embed(EmbedRequest(inputs=[EmbedInput(text="ab")]))
        assert reply.prompt_tokens == 3


async def test_the_model_says_how_it_pools() -> None:
    async with embedding() as it:
        model = (await it.model.GetModel(model_pb2.GetModelRequest())).model
        info = (await it.model.GetServerInfo(model_pb2.GetServerInfoRequest())).info
    assert model.pooling == embedding_pb2.POOLING_MEAN
    assert info.features.embedding


REFUSED: list[tuple[EmbedRequest, Code, str, str]] = [
    (EmbedRequest(), Code.INVALID_ARGUMENT, "INVALID_FIELD", "inputs"),
    (EmbedRequest(inputs=[EmbedInput()]), Code.INVALID_ARGUMENT, "INVALID_FIELD", "inputs[0]"),
    (EmbedRequest(inputs=[ids()]), Code.INVALID_ARGUMENT, "INVALID_FIELD", "has no tokens"),
    (EmbedRequest(inputs=[ids(1)], norm=-2), Code.INVALID_ARGUMENT, "INVALID_FIELD", "norm"),
    (
        EmbedRequest(inputs=[ids(*[1] * 65)]),
        Code.OUT_OF_RANGE,
        "BATCH_OVERFLOW",
        "input (65 tokens) is too large to process",
    ),
    (
        EmbedRequest(inputs=[ids(1)], pooling=embedding_pb2.POOLING_RANK),
        Code.UNIMPLEMENTED,
        "NOT_SUPPORTED",
        "RANK pooling",
    ),
    (
        EmbedRequest(inputs=[EmbedInput(pair=embedding_pb2.RankPair(query="a", document="b"))]),
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
        "inputs[0]: a pair, which needs RANK pooling",
    ),
    (
        EmbedRequest(inputs=[ids(*[1] * 66_000)] * 2, pooling=embedding_pb2.POOLING_NONE),
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
        "132000 rows of 8 numbers would make a reply of",
    ),
]


@pytest.mark.parametrize(("request_", "code", "reason", "text"), REFUSED)
async def test_refusals(request_: EmbedRequest, code: Code, reason: str, text: str) -> None:
    async with embedding() as it:
        failed = await failure(it.embedding.Embed(request_))
        assert (failed.code, failed.reason) == (code, reason)
        assert text in failed.text
