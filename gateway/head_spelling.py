"""The names of an answer's headers, spelt as llama-server spells them.

HTTP does not care, but clients that look up `Access-Control-Allow-Origin` in a plain dictionary
do, and Starlette and uvicorn write every name in lower case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_INTERIM = b"HTTP/1.1 1"


class SpellingTransport(asyncio.Transport):
    """Stands before a connection for one answer, whose head uvicorn writes in one piece."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        """Writes to `transport`; `close` is how it is closed."""
        super().__init__()
        self._transport = transport
        self._close = close
        self._is_head_written = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Passes everything on, the head with its names spelt."""
        if not self._is_head_written and not bytes(data).startswith(_INTERIM):
            self._is_head_written = True
            data = spell(bytes(data))
        self._transport.write(data)

    def is_closing(self) -> bool:
        """As the connection says."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Closes the connection."""
        self._close()


def spell(head: bytes) -> bytes:
    r"""Capitalises each word of each header's name.

    >>> spell(b"HTTP/1.1 200 OK\r\nx-accel-buffering: no\r\n\r\n")
    b'HTTP/1.1 200 OK\r\nX-Accel-Buffering: no\r\n\r\n'
    """
    status, *lines = head.split(b"\r\n")
    named = [line.partition(b":") for line in lines]
    return b"\r\n".join([status, *(name.title() + colon + value for name, colon, value in named)])
