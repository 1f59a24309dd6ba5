"""Five hundred random requests: a stream says, byte for byte, what one answer says."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.conftest import CALL_TOKEN, KEY, Server, http_client
from tests.streams.compare import Reached, compare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_REQUESTS = 500
_AT_ONCE = 4


async def test_500_streams_say_what_one_answer_says(assistant: Server) -> None:
    reached = Reached()
    turns = asyncio.Semaphore(_AT_ONCE)
    failed: list[str] = []

    async def run(seed: int) -> None:
        async with turns:
            try:
                await compare(http, seed, CALL_TOKEN, reached)
            except AssertionError as error:
                failed.append(str(error))

    async with http_client(assistant.url, KEY) as http:
        await asyncio.gather(*(run(seed) for seed in range(_REQUESTS)))
    assert not failed, f"{len(failed)} differ: " + "\n".join(failed[:8])
    # Enough of every kind was tried.
    assert all(count >= 30 for count in reached.counts.values()), reached.counts
    assert len(reached.counts) == 11, reached.counts
