"""Half of the clients of a gateway stop reading: the others finish, and who has stopped is cut."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from dataclasses import replace

import httpx
import pytest

from engine.step import StepBatch
from tests.contract.serving import CONFIG, serving
from tests.contract.test_lifecycle import assert_books_balance, settled
from tests.fake_runner import FakeRunner
from tests.unit.gateway.conftest import serving as gateway_serving

# A single one is met in every run: `unit/gateway/test_unread_answers`.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_NUM_EACH = 16
_LIMIT_S = 2
# No answer ends within so many steps but those of the readers, and each of the others is longer by
# far than what its connection, and uvicorn behind it, take of it.
_STEPS = 120
_BUFFER_BYTES = 1 << 14
_CONFIG = replace(CONFIG, num_slots=2 * _NUM_EACH, context_tokens=2 * _NUM_EACH * 1024)


def _stalled(url: httpx.URL) -> socket.socket:
    """Asks for a stream, of which no byte will be read."""
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    door.connect((url.host, url.port))
    body = {"prompt": "x", "stream": True, "ignore_eos": True, "n_predict": 900, "n_probs": 100}
    content = json.dumps(body).encode()
    head = f"POST /completion HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
    door.sendall(head.encode() + content)
    door.setblocking(False)
    return door


async def _rest(door: socket.socket) -> bytes:
    """What the system still had for a client whose connection was cut."""
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    async with asyncio.timeout(60):
        while part := await loop.sock_recv(door, 1 << 16):
            parts.append(part)
    return b"".join(parts)


async def test_16_of_32_event_streams_stop_reading(caplog: pytest.LogCaptureFixture) -> None:
    steps = threading.Semaphore(0)

    def run(batch: StepBatch) -> None:
        del batch
        steps.acquire()

    runner = FakeRunner(num_pages=4096, page_tokens=16, on_run=run)
    async with (
        serving(config=_CONFIG, runner=runner, stall_limit_s=600) as it,
        gateway_serving(
            f"127.0.0.1:{it.server.port}", timeout_s=_LIMIT_S, send_buffer_bytes=_BUFFER_BYTES
        ) as http,
    ):
        doors = [_stalled(http.base_url) for _ in range(_NUM_EACH)]
        try:
            body = {"prompt": "y", "stream": True, "ignore_eos": True, "n_predict": 50}
            reading = [
                asyncio.create_task(http.post("/completion", json=body, timeout=None))
                for _ in range(_NUM_EACH)
            ]
            for _ in range(2 * _NUM_EACH):
                await it.commanded("submit")
            steps.release(_STEPS)
            answers = await asyncio.gather(*reading)
            ends = [answer.text.rpartition("data: ")[2] for answer in answers]
            assert all('"tokens_predicted":50' in end for end in ends)
            for _ in range(_NUM_EACH):
                await it.commanded("cancel")
            rests = [await _rest(door) for door in doors]
            assert all(rest.startswith(b"HTTP/1.1 200 ") for rest in rests)
            assert not any(b'"stop":true' in rest for rest in rests)
        finally:
            steps.release(1 << 20)
            for door in doors:
                door.close()
        await settled(it)
        assert_books_balance(it)
        assert it.engine.snapshot().counters.requests_cancelled == _NUM_EACH
    # It is no fault of the server's.
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
