"""HTTP/2 frames written by hand, for what no client library would send.

Source: RFC 9113 sections 4 and 6; RFC 7541 section 6.2.2 for fields without an index.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0x1, 0x3, 0x4, 0x6, 0x9
END_HEADERS = 0x4
_CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame; its payload is under 16 MiB."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def field(name: str, value: str) -> bytes:
    """One header field, literally; both texts are under 127 bytes."""
    coded = bytearray([0])
    for text in (name, value):
        coded += bytes([len(text)]) + text.encode()
    return bytes(coded)


def call_fields(path: str) -> bytes:
    """The header block of a gRPC call."""
    return b"".join(
        field(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "a"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        )
    )


def begun(stream: int, fields: bytes) -> bytes:
    """A call whose request has not come yet."""
    return frame(HEADERS, END_HEADERS, stream, fields)


def reset(stream: int) -> bytes:
    """Gives a stream up."""
    return frame(RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))


class Attacker:
    """One connection that only writes; what comes is thrown away."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._reading = asyncio.ensure_future(_read_away(reader))

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed it."""
        return self._reading.done()

    async def send(self, data: bytes) -> bool:
        """Writes; False once the server has closed the connection."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except ConnectionError:
            return False
        return not self.is_closed

    async def close(self) -> None:
        """Leaves without a word."""
        self._writer.transport.abort()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def attacking(address: str) -> AsyncGenerator[Attacker]:
    """A connection to `host:port` that has sent preface and settings."""
    host, _, port = address.rpartition(":")
    attacker = Attacker(*await asyncio.open_connection(host, int(port)))
    try:
        await attacker.send(PREFACE + frame(SETTINGS, 0, 0))
        yield attacker
    finally:
        await attacker.close()


async def _read_away(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
