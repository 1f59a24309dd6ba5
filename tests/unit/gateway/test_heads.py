"""Heads over raw sockets: requests' that are slow or endless, and how those of answers look."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.protocol import BoundedHttpProtocol
from tests.unit.gateway.fake_service import FakeService
from tests.unit.gateway.test_lifecycle import Gate

_BODY = b'{"prompt":"Hi"}'
_REQUEST = b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n" + _BODY
_LATE = b"HTTP/1.1 408 Request Timeout\r\n"


class Peer:
    """A raw connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def read_answer(self) -> bytes:
        """Reads one answer whose length is told."""
        head = await self.read_head()
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head + await self._reader.readexactly(length)

    async def read_head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def read_all(self) -> bytes:
        """Reads until the gateway closes."""
        return await self._reader.read()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Ends the connection out of order, as by a program that was killed."""
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Dial = Callable[[], Awaitable[Peer]]


@pytest.fixture
async def dial(client: httpx.AsyncClient) -> AsyncIterator[Dial]:
    url = urlsplit(str(client.base_url))
    peers: list[Peer] = []

    async def dialled() -> Peer:
        peers.append(Peer(*await asyncio.open_connection(url.hostname, url.port)))
        return peers[-1]

    yield dialled
    for peer in peers:
        peer.close()


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttpProtocol, "head_timeout_s", 1.0)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    "head", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\na: b", b"\r\n"]
)
async def test_heads_that_never_end_are_given_up(
    client: httpx.AsyncClient, dial: Dial, head: bytes
):
    peers = [await dial() for _ in range(20)]
    for peer in peers:
        peer.send(head)
    assert (await client.get("/health")).status_code == 200
    for peer in peers:
        assert (await peer.read_all()).startswith(_LATE)


@pytest.mark.usefixtures("_short")
async def test_a_head_in_drops_has_no_more_time(dial: Dial):
    peer = await dial()
    # To read on would be to meet the reset that a drop too many is answered with.
    reading = asyncio.create_task(peer.read_answer())
    peer.send(b"GET / HTTP/1.1\r\na: ")
    while not reading.done():
        peer.send(b"a")
        await asyncio.wait((reading,), timeout=0.01)
    assert reading.result().startswith(_LATE)


@pytest.mark.usefixtures("_short")
async def test_a_connection_without_a_request_is_closed_without_a_word(dial: Dial):
    assert await (await dial()).read_all() == b""


async def test_connections_that_were_reset_are_not_kept(
    dial: Dial, monkeypatch: pytest.MonkeyPatch
):
    """uvicorn's timer for their next request kept each of them, 7 KB, for a minute."""
    lose, lost = BoundedHttpProtocol.connection_lost, asyncio.Queue[None]()

    def watched(connection: BoundedHttpProtocol, error: Exception | None) -> None:
        lose(connection, error)
        lost.put_nowait(None)

    monkeypatch.setattr(BoundedHttpProtocol, "connection_lost", watched)
    before = _num_kept()
    peers = [await dial() for _ in range(10)]
    for peer in peers:
        peer.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await peer.read_answer()
        peer.reset()
        await lost.get()
    # The last one's transport lets go of it in the loop's next turn.
    await asyncio.sleep(0)
    assert _num_kept() <= before


def _num_kept() -> int:
    gc.collect()
    return sum(isinstance(thing, BoundedHttpProtocol) for thing in gc.get_objects())


@pytest.mark.usefixtures("_short")
async def test_a_later_head_has_its_own_time(dial: Dial):
    peer = await dial()
    peer.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await peer.read_answer()
    peer.send(b"GET /health HT")
    assert (await peer.read_all()).startswith(_LATE)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("early", [b"", b"\r\n", b"GET /health HT"])
async def test_an_answer_may_take_longer_than_a_head(
    dial: Dial, service: FakeService, early: bytes
):
    gate = Gate(starts=True)
    service.script = gate
    asking = await dial()
    asking.send(_REQUEST + early)
    await gate.reached.wait()
    # Another's head runs out of time, later than the first would have.
    other = await dial()
    other.send(b"G")
    assert (await other.read_all()).startswith(_LATE)
    gate.open.set()
    assert b" 200 " in await asking.read_answer()


@pytest.mark.usefixtures("_short")
async def test_a_body_that_nobody_reads_has_no_more_time_than_a_head(dial: Dial):
    peer = await dial()
    peer.send(b"POST /no/such HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    assert b" 404 " in await peer.read_answer()
    assert await peer.read_all() == b""


@pytest.mark.parametrize(
    ("head", "limit"),
    [
        (b"GET / HTTP/1.1\r\n" + b"h: x\r\n" * 101, b"100 headers"),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 65_536 + b"\r\n", b"65536 bytes"),
        (b"GET /" + b"a" * 65_536 + b" HTTP/1.1\r\n", b"65536 bytes"),
    ],
    ids=["many", "long", "path"],
)
async def test_whole_heads_are_bounded_too(dial: Dial, head: bytes, limit: bytes):
    peer = await dial()
    peer.send(head + b"\r\n")
    answer = await peer.read_all()
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b" has more than " + limit + b".")
    assert answer.count(b"HTTP/1.1") == 1


_CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"


async def test_headers_behind_a_body_are_counted_too(dial: Dial):
    peer = await dial()
    peer.send(_CHUNKED + b"0\r\n" + b"h: x\r\n" * 101)
    assert (await peer.read_all()).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize("rest", [b"0\r\na: ", b"1;"], ids=["trailer", "extension"])
async def test_what_never_ends_behind_a_body_is_given_up(dial: Dial, rest: bytes):
    peer = await dial()
    # Several times what the gateway reads at once.
    peer.send(_CHUNKED + rest + b"b" * (4 << 20))
    # A refusal may overtake what is still on its way, and then its words are lost.
    with contextlib.suppress(ConnectionError):
        assert (await peer.read_all()).startswith(b"HTTP/1.1 400 Bad Request\r\n")


async def test_a_refusal_does_not_go_into_the_middle_of_an_answer(dial: Dial, service: FakeService):
    gate = Gate(starts=True)
    service.script = gate
    peer = await dial()
    body = b'{"prompt":"Hi","stream":true}'
    peer.send(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 29\r\n\r\n" + body)
    head = await peer.read_head()
    assert head.startswith(b"HTTP/1.1 200 ")
    peer.send(b"no request\r\n\r\n")
    assert b"HTTP/1.1" not in await peer.read_all()
    await service.calls[0].was_cancelled.wait()


async def test_a_hundred_headers_are_taken(dial: Dial):
    peer = await dial()
    head = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + b"h: x\r\n" * 99
    peer.send(head + b"\r\n")
    assert (await peer.read_all()).startswith(b"HTTP/1.1 200 ")


def names(head: bytes) -> set[str]:
    lines = head.split(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return {line.split(":")[0] for line in lines}


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
async def test_names_of_headers_are_spelt_as_the_peer_spells_them(dial: Dial, expect: bytes):
    peer = await dial()
    body = b'{"prompt":"Hi","stream":true}'
    head = b"POST /completion HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 29\r\n"
    peer.send(head + expect + b"\r\n" + body)
    answer = await peer.read_all()
    if expect:
        interim, _, answer = answer.partition(b"\r\n\r\n")
        assert interim.startswith(b"HTTP/1.1 100")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert names(answer) >= {
        "Server",
        "Content-Type",
        "Access-Control-Allow-Origin",
        "X-Accel-Buffering",
        "Transfer-Encoding",
    }
    assert b"\r\nServer: llama.cpp\r\n" in answer


async def test_a_preflight_is_spelt_so_too(dial: Dial):
    peer = await dial()
    peer.send(b"OPTIONS / HTTP/1.1\r\nHost: x\r\nOrigin: a.B\r\nConnection: close\r\n\r\n")
    answer = await peer.read_all()
    assert b"\r\nAccess-Control-Allow-Origin: a.B\r\n" in answer
    assert names(answer) >= {
        "Access-Control-Allow-Credentials",
        "Access-Control-Allow-Methods",
        "Access-Control-Allow-Headers",
    }
