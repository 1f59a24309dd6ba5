"""Hostile bytes against whole processes: answered or closed, and neither memory nor time grows.

Memory is what the kernel says that a process holds, time what it has used of a processor: neither
depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Start, healthy, http_client
from tests.e2e.programs import Program

pytestmark = pytest.mark.slow

_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20


@pytest.fixture(scope="module")
def target(start: Start) -> Generator[Program]:
    with start() as program:
        yield program.ready()


def _processes(program: Program) -> list[int]:
    """The server and its gateway."""
    pid = program.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def _rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"process {pid} has no memory")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@asynccontextmanager
async def _lasting_growth_under(program: Program, limit: int) -> AsyncGenerator[None]:
    """Demands that both processes are as large afterwards as before, and answer."""
    url = program.http_url()
    await healthy(url)
    before = {pid: _rss(pid) for pid in _processes(program)}
    yield
    await healthy(url)
    after = {pid: _rss(pid) for pid in _processes(program)}
    assert after.keys() == before.keys()
    for pid, size in after.items():
        assert size - before[pid] <= limit, f"{pid} grew by {size - before[pid]} bytes"


async def _raw(program: Program, *parts: bytes, timeout_s: float = 20.0) -> bytes:
    """Sends bytes and returns what comes back until the end of the connection."""
    host, port = program.http_url().removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(timeout_s):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    except (ConnectionError, BrokenPipeError):
        return b""  # closed while it was still being written to
    finally:
        writer.close()


def _status(answer: bytes) -> int:
    """Of the first answer; 0 where the connection was closed without one."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


_HEAD = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
_CHAT = b"POST /completion HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"

HEADS = {
    "1 MiB in a header": (_HEAD + b"a: " + b"b" * _MIB + b"\r\n\r\n",),
    "10,000 headers": (_HEAD + b"".join(b"h%d: v\r\n" % i for i in range(10_000)) + b"\r\n",),
    "a path of 1 MiB": (b"GET /" + b"a" * _MIB + b" HTTP/1.1\r\nhost: a\r\n\r\n",),
    "a length and chunks": (
        _CHAT + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "two lengths": (_CHAT + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}",),
    "a length below 0": (_CHAT + b"content-length: -1\r\n\r\n{}",),
    "no HTTP": (b"\x16\x03\x01" + bytes(range(256)) * 16,),
}


@pytest.mark.parametrize("name", HEADS)
async def test_bad_heads_are_refused_or_closed(target: Program, name: str) -> None:
    await _raw(target, *HEADS[name])  # what is made once
    async with _lasting_growth_under(target, 8 * _MIB):
        for _ in range(5):
            assert _status(await _raw(target, *HEADS[name])) in (0, 400, 431, 413, 414)


async def test_a_range_of_10000_parts_is_an_ordinary_answer(target: Program) -> None:
    parts = ",".join(f"{i}-{i}" for i in range(10_000))
    async with _lasting_growth_under(target, 8 * _MIB), http_client(target.http_url()) as session:
        answer = await session.get("/", headers={"range": f"bytes={parts}"})
        # Beyond the bound of heads, or ignored: never 10,000 parts.
        assert answer.status_code in (200, 400, 431)
        assert len(answer.content) < _MIB


async def test_3_mib_in_chunks_of_a_byte_do_not_stay(target: Program) -> None:
    body = b'{"prompt": "' + b" " * (3 * _MIB) + b'"'  # no JSON: it lacks its brace
    head = _CHAT + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    await _raw(target, head, chunks, timeout_s=120)
    async with _lasting_growth_under(target, 8 * _MIB):
        assert _status(await _raw(target, head, chunks, timeout_s=120)) == 500


async def test_200_heads_in_drops_keep_nobody_waiting(target: Program) -> None:
    host, port = target.http_url().removeprefix("http://").rsplit(":", 1)
    async with _lasting_growth_under(target, 8 * _MIB):
        drops = [socket.create_connection((host, int(port))) for _ in range(200)]
        try:
            for drop in drops:
                drop.sendall(b"GET /health HTTP/1.1\r\na")
            async with http_client(target.http_url()) as session:
                answer = await session.post("/completion", json={"prompt": "a", "n_predict": 2})
            assert answer.status_code == 200
        finally:
            for drop in drops:
                drop.close()


BODIES: dict[str, bytes] = {
    "100,000 lists": b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    "100,000 lists in a field": b'{"prompt":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a lone surrogate": b'{"prompt":"\\ud800"}',
    "half a pair": b'{"prompt":"\\udc00\\ud800"}',
    "no UTF-8": b'{"prompt":"\xff\xfe"}',
    "a number of 100,000 digits": b'{"prompt":"a","seed":' + b"9" * 100_000 + b"}",
    "1e400": b'{"prompt":"a","temperature":1e400}',
    "NUL": b'{"prompt":"a\\u0000b","n_predict":1}',
    "a bare NUL": b"\0",
    "the same key twice": b'{"prompt":"a","prompt":"b","n_predict":1}',
}
ROUTES = (
    "/completion",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/infill",
    "/v1/embeddings",
    "/rerank",
    "/slots/0?action=erase",
    "/lora-adapters",
    "/pools",
    "/props",
)


@pytest.mark.parametrize("route", ROUTES)
async def test_no_body_is_a_fault(target: Program, route: str) -> None:
    """500 is what the peer answers to what is no JSON, 501 to what is off; neither is a bug."""
    async with http_client(target.http_url()) as session:
        for name, body in BODIES.items():
            answer = await session.post(route, content=body)
            assert answer.status_code in (200, 400, 404, 413, 500, 501), name
            if answer.status_code == 200:
                continue
            error = answer.json()["error"] if "error" in answer.json() else answer.json()
            assert "internal error" not in error["message"], name
            assert "Traceback" not in answer.text


def _amplifiers() -> dict[str, tuple[str, Any]]:
    """Bodies of at most 10 KiB that ask for much work."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    shared = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(40)}
    references = {"$defs": shared | {"d40": {"type": "null"}}, "$ref": "#/$defs/d0"}
    chat = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": references}}]
    completion, talk = "/completion", "/v1/chat/completions"
    return {
        "repetitions": (completion, {"prompt": "a", "grammar": "root ::= " + "(" * 80 + "a"}),
        "repeated repetitions": (
            completion,
            {"prompt": "a", "grammar": 'root ::= (("a"{999}){999}){999}'},
        ),
        "alternatives": (
            completion,
            {"prompt": "a", "grammar": "root ::= " + "|".join(['"a"'] * 1500)},
        ),
        "a deep schema": (completion, {"prompt": "a", "json_schema": deep}),
        "references": (completion, {"prompt": "a", "json_schema": references}),
        "a regex": (
            completion,
            {"prompt": "a", "json_schema": {"type": "string", "pattern": "^(a{1,99}){1,99}$"}},
        ),
        "a length": (
            completion,
            {"prompt": "a", "json_schema": {"type": "string", "maxLength": 10**9}},
        ),
        "items": (completion, {"prompt": "a", "json_schema": {"type": "array", "maxItems": 10**9}}),
        "a range": (
            completion,
            {"prompt": "a", "json_schema": {"type": "integer", "maximum": 10**300}},
        ),
        "tools": (talk, {"messages": chat, "tools": tools}),
        "a trigger": (
            completion,
            {
                "prompt": "a",
                "grammar": 'root ::= "a"',
                "grammar_lazy": True,
                "grammar_triggers": [{"type": 2, "value": "(a+)+" * 200 + "b"}],
            },
        ),
        "stops": (completion, {"prompt": "a", "stop": ["a" * 30] * 256}),
        "breakers": (
            completion,
            {"prompt": "a", "dry_multiplier": 1, "dry_sequence_breakers": ["a"] * 2000},
        ),
        "biases": (completion, {"prompt": "a", "logit_bias": [[i, -1] for i in range(900)]}),
        "samplers": (completion, {"prompt": "a", "samplers": ["top_k"] * 900}),
        "prompts": (completion, {"prompt": [["a"]] * 1400}),
        "messages": (talk, {"messages": [{"role": "user", "content": ""}] * 300}),
    }


# What is admitted runs for one token, which is work that was asked for.
AMPLIFIERS = _amplifiers()


@pytest.mark.parametrize("name", AMPLIFIERS)
async def test_10_kib_cost_little_before_they_are_admitted(target: Program, name: str) -> None:
    path, body = AMPLIFIERS[name]
    content = json.dumps(body | {"n_predict": 1, "max_tokens": 1}).encode()
    assert len(content) <= 10 << 10
    rounds = 20
    async with http_client(target.http_url()) as session:
        # What is made once: each thread of a pool takes memory when it works first.
        for _ in range(6):
            await asyncio.gather(*(session.post(path, content=content) for _ in range(16)))
        plain = {"prompt": "a", "n_predict": 1}
        async with _lasting_growth_under(target, _MIB):
            before = sum(map(_cpu_s, _processes(target)))
            for _ in range(rounds):
                answer = await session.post(path, content=content)
                assert answer.status_code in (200, 400, 500, 503), answer.text
                assert "internal error" not in answer.text
            used_s = (sum(map(_cpu_s, _processes(target))) - before) / rounds
        before = sum(map(_cpu_s, _processes(target)))
        for _ in range(rounds):
            await session.post("/completion", json=plain)
        ordinary_s = (sum(map(_cpu_s, _processes(target))) - before) / rounds
    # Beside what an ordinary request of one token costs.
    assert used_s - ordinary_s <= 0.1, f"{used_s} s of a processor"
