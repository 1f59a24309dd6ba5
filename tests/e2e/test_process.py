"""kvarts-server as an operator sees it: how it starts beside others, refuses, and ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import NUM_SLOTS, Server, Start, healthy, http_client
from tests.e2e.programs import Program, running
from tests.e2e.rpc import client

pytestmark = pytest.mark.slow

ENDLESS: dict[str, Any] = {
    "prompt": "the day",
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


async def ended(program: Program) -> int:
    """Waits for the end of a program and of all that it started; returns its status."""
    return await asyncio.to_thread(program.exit_status)


@asynccontextmanager
async def ready(program: Program) -> AsyncGenerator[httpx.AsyncClient]:
    """Waits until a program serves; yields an HTTP client of it."""
    url = await asyncio.to_thread(program.ready().http_url)
    await healthy(url)
    async with http_client(url) as http:
        yield http


async def _last_event(response: httpx.Response) -> dict[str, Any]:
    """Reads a stream to its end; returns the last event."""
    assert response.status_code == 200
    lines = [line async for line in response.aiter_lines() if line]
    return json.loads(lines[-1].removeprefix("data: "))


async def _drained(response: httpx.Response) -> None:
    """Reads to the end, or to where the server cut it."""
    try:
        async for _ in response.aiter_bytes():
            pass
    except httpx.RemoteProtocolError:
        return


async def test_sigterm_ends_running_and_queued_requests_and_both_processes(start: Start) -> None:
    # The limit is 2 s of --shutdown-timeout, then 2 s until the server ends itself with status 1:
    # a status of 0 is the proof that it kept its time.
    with start("--grpc-port", "0") as program:
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(ready(program))
            rpc = await stack.enter_async_context(client(program.grpc_address()))
            answers = [
                await stack.enter_async_context(http.stream("POST", "/completion", json=ENDLESS))
                for _ in range(NUM_SLOTS)
            ]
            waiting = asyncio.create_task(http.post("/completion", json={"prompt": "the"}))
            await rpc.queued(1)
            program.process.send_signal(signal.SIGTERM)
            refused = await waiting
            assert refused.status_code == 503
            assert refused.headers["x-kvarts-reason"] == "SHUTTING_DOWN"
            assert "retry-after" in refused.headers
            for answer in answers:
                last = await _last_event(answer)
                assert last["error"]["code"] == 503
        assert await ended(program) == 0
        assert "Traceback" not in program.output.text()


@pytest.mark.parametrize(
    ("path", "count"),
    [("/v1/completions", "completion_tokens"), ("/completion", "tokens_predicted")],
)
async def test_a_longer_shutdown_timeout_lets_running_answers_end(
    start: Start, path: str, count: str
) -> None:
    with start("--shutdown-timeout", "120") as program:
        async with ready(program) as http:
            body = {**ENDLESS, "n_predict": 600}
            async with http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                program.process.send_signal(signal.SIGTERM)
                text = (await answer.aread()).decode()
        assert '{"error"' not in text
        assert f'"{count}":600' in text
        assert await ended(program) == 0


async def test_a_killed_server_leaves_no_gateway(start: Start) -> None:
    with start() as program:
        async with (
            ready(program) as http,
            http.stream("POST", "/completion", json=ENDLESS) as reply,
        ):
            assert reply.status_code == 200
            program.process.kill()
            await _drained(reply)
        assert await ended(program) == -signal.SIGKILL


async def test_sigterm_during_the_load_ends_both(tiny_model: Path, tmp_path: Path) -> None:
    # With an empty compile cache the load takes far longer than a stop may.
    flags = ("-m", str(tiny_model), "-np", "1", "--compile-cache", str(tmp_path), "--port", "0")
    with running("kvarts-server", *flags) as program:
        url = program.http_url()
        await asyncio.to_thread(program.output.wait_for, re.compile("weights: 100 %"), 60)
        async with http_client(url) as http:
            assert (await http.get("/health")).status_code == 503
        program.process.send_signal(signal.SIGTERM)
        assert await ended(program) == 0
        assert " ready" not in program.output.text()


async def test_two_servers_run_side_by_side(start: Start) -> None:
    with start() as first, start() as second:
        async with ready(first) as one, ready(second) as two:
            body = {"prompt": "the day", "n_predict": 8, "temperature": 0}
            replies = [await http.post("/completion", json=body) for http in (one, two)]
            assert [reply.status_code for reply in replies] == [200, 200]
            assert replies[0].json()["content"] == replies[1].json()["content"]
            first.process.send_signal(signal.SIGTERM)
            assert await ended(first) == 0
            # The end of one is not noticed by the other.
            assert (await two.post("/completion", json=body)).status_code == 200


async def test_a_taken_http_port_ends_the_second_server_by_name(
    server: Server, tiny_model: Path
) -> None:
    port = str(urlsplit(server.url).port)
    with running("kvarts-server", "-m", str(tiny_model), "--port", port) as program:
        assert await ended(program) == 1
        assert _complaints(program, f"127.0.0.1:{port}") == 1
        assert "Traceback" not in program.output.text()


async def test_a_taken_grpc_port_ends_the_second_server_by_name(
    server: Server, tiny_model: Path
) -> None:
    port = server.grpc_address.rpartition(":")[2]
    flags = ("-m", str(tiny_model), "--port", "0", "--grpc-port", port)
    with running("kvarts-server", *flags) as program:
        assert await ended(program) == 1
        assert _complaints(program, f"127.0.0.1:{port}") == 1
        assert "Traceback" not in program.output.text()


@pytest.mark.parametrize("name", ["kvarts-server", "kvarts-service", "kvarts-gateway"])
def test_an_unknown_flag_is_refused_by_name(name: str) -> None:
    with running(name, "--no-such-flag") as program:
        assert program.exit_status() == 1
        assert len(program.output.lines) == 1
        assert "--no-such-flag" in program.output.lines[0]


def test_a_missing_model_ends_both(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    with running("kvarts-server", "-m", missing, "--port", "0") as program:
        assert program.exit_status() == 1
        assert _complaints(program, missing) == 1
        assert "Traceback" not in program.output.text()


@pytest.mark.parametrize(
    "kept_bytes", [pytest.param(0, id="empty"), pytest.param(-1000, id="cut"), 100]
)
def test_a_damaged_model_ends_both(tiny_model: Path, tmp_path: Path, kept_bytes: int) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_model.read_bytes()[:kept_bytes])
    with running("kvarts-server", "-m", str(damaged), "--port", "0") as program:
        assert program.exit_status() == 1
        assert _complaints(program, "cannot load the model: ") == 1
        assert "Traceback" not in program.output.text()


def _complaints(program: Program, words: str) -> int:
    """How many lines of an error (or of a program's own complaint) hold these words."""
    marks = (" E ", "kvarts-server: ", "kvarts-gateway: ")
    return sum(words in line and any(m in line for m in marks) for line in program.output.lines)
