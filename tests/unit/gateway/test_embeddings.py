"""The embedding and rerank routes over a service whose vectors are known."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import pytest
from kvarts.v1 import embedding_pb2

from tests.unit.gateway.conftest import Serve
from tests.unit.gateway.fake_service import FakeService


@pytest.fixture
def service(service: FakeService) -> FakeService:
    service.info.features.embedding = True
    service.info.features.reranking = True
    service.model.pooling = embedding_pb2.POOLING_MEAN
    service.model.embedding_size = 2
    return service


async def _post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_openai(client: httpx.AsyncClient):
    answer = await _post(client, "/v1/embeddings", input=["ab", [5, 6, 7, 8]], model="mine")
    # A text of two bytes has BOS in front.
    assert answer == {
        "model": "mine",
        "object": "list",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
        "data": [
            {"embedding": [3.0, 0.5], "index": 0, "object": "embedding"},
            {"embedding": [4.0, 0.5], "index": 1, "object": "embedding"},
        ],
    }


async def test_base64_is_little_endian_float32(client: httpx.AsyncClient):
    answer = await _post(client, "/v1/embeddings", input=[5, 6], encoding_format="base64")
    (item,) = answer["data"]
    assert item["encoding_format"] == "base64"
    assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == (2.0, 0.5)


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
async def test_native(client: httpx.AsyncClient, path: str):
    assert await _post(client, path, content="ab") == [{"index": 0, "embedding": [[3.0, 0.5]]}]


async def test_content_on_the_openai_path_asks_for_the_native_answer(client: httpx.AsyncClient):
    answer = await _post(client, "/v1/embeddings", content=["a", "ab"])
    assert [row["embedding"] for row in answer] == [[[2.0, 0.5]], [[3.0, 0.5]]]


async def test_no_pooling_gives_a_row_per_token(serve: Serve, service: FakeService):
    service.model.pooling = embedding_pb2.POOLING_NONE
    async with serve() as client:
        (row,) = await _post(client, "/embedding", content="a")
        assert row["embedding"] == [[2.0, 0.5], [2.0, 0.5]]
        refused = await client.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 400
        assert "Pooling type 'none'" in refused.json()["error"]["message"]


async def test_content_pieces_are_one_text(client: httpx.AsyncClient):
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = await _post(client, "/v1/embeddings", input={"content": pieces})
    assert answer["usage"]["prompt_tokens"] == 3


async def test_the_norm_is_passed_on(client: httpx.AsyncClient, service: FakeService):
    await _post(client, "/embedding", content="a", embd_normalize=-1)
    assert service.embeds[-1].norm == -1
    await _post(client, "/embedding", content="a")
    assert not service.embeds[-1].HasField("norm")


async def test_replies_stay_below_what_the_service_may_send(serve: Serve, service: FakeService):
    service.model.embedding_size = 250_000
    async with serve() as client:
        answer = await _post(client, "/v1/embeddings", input=[[5]] * 9)
        assert len(answer["data"]) == 9
        # Four rows of a million bytes make four of the 4.19 that one reply may have.
        assert [len(request.inputs) for request in service.embeds] == [4, 4, 1]


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, '"input" or "content" must be provided'),
    ({"input": []}, 400, '"input" must not be empty'),
    ({"input": [[]]}, 400, "Input content cannot be empty"),
    ({"input": 5}, 500, "elements must be a string"),
    ({"input": ["a", None]}, 500, "elements must be a string"),
    ({"input": [99999]}, 400, "invalid tokens"),
    ({"input": ["a"] * 2049}, 400, "2049 inputs, the limit is 2048"),
    ({"input": "a", "encoding_format": "hex"}, 400, "either float or base64"),
    ({"input": "a", "encoding_format": 5}, 500, "type must be string"),
    ({"input": "a", "embd_normalize": "x"}, 500, "type must be number"),
    ({"input": "a", "embd_normalize": -2}, 400, '"embd_normalize" must be in [-1, 2147483647]'),
    ({"input": {"content": "a"}}, 400, "must be an array"),
    ({"input": {"content": [{"type": "image_url"}]}}, 400, '"content" parts'),
]


@pytest.mark.parametrize(("body", "status", "message"), BAD)
async def test_bad_bodies(
    client: httpx.AsyncClient, service: FakeService, body: dict[str, Any], status: int, message: str
):
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert not service.embeds


class TestRerank:
    DOCUMENTS = ("aa", "aaaa", "a")

    @pytest.mark.parametrize("path", ["/rerank", "/v1/reranking"])
    async def test_jina(self, client: httpx.AsyncClient, path: str):
        answer = await _post(client, path, query="q", documents=self.DOCUMENTS, top_n=2)
        assert answer == {
            "model": "tiny.gguf",
            "object": "list",
            "usage": {"prompt_tokens": 7, "total_tokens": 7},
            "results": [
                {"index": 1, "relevance_score": 4.0},
                {"index": 0, "relevance_score": 2.0},
            ],
        }

    async def test_a_long_query_is_not_copied_for_all_documents_at_once(
        self, client: httpx.AsyncClient, service: FakeService
    ):
        query = "q" * (1 << 20)
        answer = await _post(client, "/rerank", query=query, documents=["a", "aa"] * 5)
        assert [row["relevance_score"] for row in answer["results"]] == [2.0] * 5 + [1.0] * 5
        assert [len(call.inputs) for call in service.embeds] == [3, 3, 3, 1]

    async def test_tei(self, client: httpx.AsyncClient):
        answer = await _post(client, "/rerank", query="q", texts=self.DOCUMENTS, return_text=True)
        assert answer[0] == {"index": 1, "score": 4.0, "text": "aaaa"}
        assert [row["index"] for row in answer] == [1, 0, 2]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"documents": ["a"]}, '"query" must be provided'),
            ({"query": 5, "documents": ["a"]}, '"query" must be a string'),
            ({"query": "q"}, "non-empty string array"),
            ({"query": "q", "documents": []}, "non-empty string array"),
            ({"query": "q", "documents": ["a", 5]}, "non-empty string array"),
            ({"query": "q", "documents": ["a"] * 2049}, "2049 texts, the limit is 2048"),
        ],
    )
    async def test_bad_bodies(self, client: httpx.AsyncClient, body: dict[str, Any], message: str):
        response = await client.post("/rerank", json=body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
