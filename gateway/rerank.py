"""POST /rerank: how relevant documents are to a query, in Jina's form and in TEI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kvarts.v1 import embedding_pb2
from starlette.responses import Response

from gateway.connection import json_response
from gateway.embeddings import MAX_INPUTS, embeddings_of
from gateway.errors import invalid, not_supported
from gateway.exchange import Exchange
from gateway.fields import lenient_flag, lenient_integer, members_of
from gateway.off_loop import off_loop
from gateway.peer_json import Json

_DISABLED = "This server does not support reranking. Start it with `--reranking`"


@dataclass(frozen=True)
class _Asked:
    """What a body asks for; the presence of `texts` asks for TEI's form."""

    query: str
    documents: Sequence[str]
    num_results: int
    is_tei: bool
    returns_text: bool
    model: str


async def rerank(exchange: Exchange) -> Response:
    """Scores every document; the best come first.

    Source: the route of llama-server.

    Raises:
        ApiError: the server does not rerank, or the body is refused.
    """
    connection, backend = exchange.connection, exchange.backend
    if not backend.facts.info.features.reranking:
        await connection.body()
        raise not_supported(_DISABLED)
    body = members_of(await connection.json())
    weight = connection.body_bytes
    asked = await off_loop(lambda: _read(body, backend.facts.name), weight=weight)
    # Made when their call comes: each has a query of its own.
    inputs = map(partial(_input, asked.query), asked.documents)
    scoring = embeddings_of(backend, inputs, rows=[1] * len(asked.documents), weight=weight)
    return json_response(_answer(asked, await connection.while_connected(scoring)))


def _input(query: str, document: str) -> embedding_pb2.EmbedInput:
    return embedding_pb2.EmbedInput(pair=embedding_pb2.RankPair(query=query, document=document))


def _read(body: Mapping[str, Any], model_name: str) -> _Asked:
    if "query" not in body:
        raise invalid('"query" must be provided')
    query = body["query"]
    if not isinstance(query, str):
        raise invalid('"query" must be a string')
    documents = _texts(body.get("documents")) or _texts(body.get("texts"))
    if not documents:
        raise invalid('"documents" must be a non-empty string array')
    if len(documents) > MAX_INPUTS:
        raise invalid(f'"documents" has {len(documents)} texts, the limit is {MAX_INPUTS}')
    model = body.get("model")
    is_tei = "texts" in body
    return _Asked(
        query=query,
        documents=documents,
        num_results=max(0, lenient_integer(body.get("top_n"), len(documents))),
        is_tei=is_tei,
        returns_text=is_tei and lenient_flag(body.get("return_text"), False),
        model=model if isinstance(model, str) else model_name,
    )


def _texts(value: Any) -> list[str]:
    """A list of strings as it is; anything else reads as none."""
    if not isinstance(value, list):
        return []
    items = cast("list[Any]", value)
    return items if all(isinstance(item, str) for item in items) else []


def _answer(asked: _Asked, scores: Sequence[embedding_pb2.Embedding]) -> Json:
    ranked = sorted(enumerate(scores), key=lambda pair: -pair[1].values[0])
    label = "score" if asked.is_tei else "relevance_score"
    results: list[Json] = []
    for index, score in ranked[: asked.num_results]:
        result: dict[str, Json] = {"index": index, label: score.values[0]}
        if asked.returns_text:
            result["text"] = asked.documents[index]
        results.append(result)
    if asked.is_tei:
        return results
    num_tokens = sum(score.prompt_tokens for score in scores)
    return {
        "model": asked.model,
        "object": "list",
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": results,
    }
