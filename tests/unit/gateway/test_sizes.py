"""Bodies of many megabytes: their work is done off the loop, one after another."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from gateway import connection, peer_json
from gateway.off_loop import HEAVY
from tests.unit.gateway.scripts import encode


class Watched:
    """Calls of a function: on which threads, and how many at the same time."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._running = 0
        self.most_at_once = 0
        self.threads: list[str] = []

    def __call__(self, *args: Any) -> Any:
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        self.threads.append(threading.current_thread().name)
        try:
            return self._inner(*args)
        finally:
            self._running -= 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(peer_json.read)
    monkeypatch.setattr(connection.peer_json, "read", watched)
    return watched


async def test_eight_long_bodies_are_parsed_one_after_another(
    client: httpx.AsyncClient, reads: Watched
) -> None:
    body = json.dumps({"content": ["a" * HEAVY, 9]}).encode()
    answers = await asyncio.gather(*(client.post("/detokenize", content=body) for _ in range(8)))
    assert [answer.json() for answer in answers] == [{"content": ""}] * 8
    assert len(reads.threads) == 8
    assert all(name.startswith("heavy") for name in reads.threads)
    assert reads.most_at_once == 1


async def test_a_short_body_is_parsed_on_the_loop(
    client: httpx.AsyncClient, reads: Watched
) -> None:
    answer = await client.post("/tokenize", json={"content": "a" * 100_000})
    assert answer.json() == {"tokens": encode("a") * 100_000}
    assert reads.threads == [threading.current_thread().name]


async def test_a_body_of_too_many_parts_is_refused(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_json, "MAX_PARTS", 3)
    fits = await client.post("/tokenize", content=b'{"content":"[[[[","x":[[]]}')
    assert fits.json() == {"tokens": encode("[[[[")}
    answer = await client.post("/tokenize", content=b'{"content":"a","x":[[{}]]}')
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the body has more than 3 arrays and objects"
