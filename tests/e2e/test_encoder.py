"""kvarts-server with an encoder: embeddings and ranks over HTTP, and what it does not do."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.conftest import healthy, http_client
from tests.e2e.programs import Program, running
from tests.encoders import TinyEncoder, write_encoder
from tests.numerics.encoder_reference import ReferenceEncoder

pytestmark = pytest.mark.slow

EMBEDDER = TinyEncoder("nomic-bert", pooling=1)
RERANKER = TinyEncoder("bert", has_dense_head=True, num_scores=1, pooling=4)
PAIRS = [[2, 5, 6, 3, 10, 9, 13, 11], [2, 5, 6, 3, 6, 8], [2, 5, 6, 3, 15]]
DOCUMENTS = ["paris is a city", "machine learning", "small"]


def start(path: Path, cache_dir: Path, *flags: str) -> AbstractContextManager[Program]:
    cache = ("--compile-cache", str(cache_dir / "xla"))
    return running("kvarts-server", "-m", str(path), *cache, "--port", "0", *flags)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Generator[Program]:
    path = write_encoder(tmp_path_factory.mktemp("nomic") / "nomic.gguf", EMBEDDER)
    with start(path, cache_dir, "--embeddings", "-ub", "128") as program:
        yield program.ready()


async def post(program: Program, path: str, body: Any) -> httpx.Response:
    url = program.http_url()
    await healthy(url)
    async with http_client(url) as session:
        return await session.post(path, json=body)


async def test_vectors_are_the_models(embedder: Program, tmp_path: Path) -> None:
    reference = ReferenceEncoder(write_encoder(tmp_path / "nomic.gguf", EMBEDDER))
    texts = ["The machine is learning", "paris, a Big city!", "small " * 40]
    answer = (await post(embedder, "/v1/embeddings", {"input": texts})).json()
    tokens = [
        (await post(embedder, "/tokenize", {"content": text, "add_special": True})).json()["tokens"]
        for text in texts
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    for given, ids in zip(answer["data"], tokens, strict=True):
        mean = reference.states(ids).mean(0)
        assert np.allclose(given["embedding"], mean / np.linalg.norm(mean), atol=1e-5)


async def test_what_it_does_not_do(embedder: Program) -> None:
    for path in ("/completion", "/v1/completions"):
        refused = await post(embedder, path, {"prompt": "the"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (
            500,
            "the current context does not support logits computation. skipping",
        )
    assert (await post(embedder, "/rerank", {"query": "a", "documents": ["a"]})).status_code == 501
    assert (await post(embedder, "/lora-adapters", [])).status_code == 501
    long = await post(embedder, "/embedding", {"content": "the " * 200})
    assert long.json()["error"] == {
        "code": 500,
        "message": "input (202 tokens) is too large to process. increase the physical batch size "
        "(current batch size: 128)",
        "type": "server_error",
    }


async def test_documents_are_ranked(tmp_path: Path, cache_dir: Path) -> None:
    path = write_encoder(tmp_path / "rank.gguf", RERANKER)
    reference = ReferenceEncoder(path)
    expected = [float(reference.scores(reference.states(pair)[0])[0]) for pair in PAIRS]
    with start(path, cache_dir, "--reranking") as program:
        program.ready()
        body = {"query": "the machine", "documents": DOCUMENTS}
        answer = (await post(program, "/v1/rerank", body)).json()
        assert answer["usage"] == {"prompt_tokens": 19, "total_tokens": 19}
        ranks: list[dict[str, Any]] = answer["results"]
        assert [rank["index"] for rank in ranks] == np.argsort(expected)[::-1].tolist()
        found = [float(rank["relevance_score"]) for rank in ranks]
        np.testing.assert_allclose(found, sorted(expected, reverse=True), atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora", "a.gguf"), "adapters: a bert model takes none (--lora)"),
        (("--pooling", "rank", "--embeddings"), "the model has no classification head"),
        (("--context-shift",), "keys of bert cannot be moved"),
    ],
)
def test_flags_that_it_cannot_honour_end_the_start(
    flags: tuple[str, ...], words: str, tmp_path: Path, cache_dir: Path
) -> None:
    (tmp_path / "a.gguf").touch()
    flags = tuple(str(tmp_path / flag) if flag.endswith(".gguf") else flag for flag in flags)
    path = write_encoder(tmp_path / "bert.gguf")
    with start(path, cache_dir, *flags) as program:
        program.output.wait_for_end(60)
        assert program.process.wait(10) == 1
        assert words in program.output.text()
