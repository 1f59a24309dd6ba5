"""Server-sent events: framing, pings, and the end of a stream whose client is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from gateway.peer_json import Json, write
from gateway.presence import ClientGone, while_present

PING = b":\n\n"


@dataclass(frozen=True)
class Framing:
    """How a dialect's events and its last error are written, and what ends a stream that went well.

    With `has_names` each event is an object of an `event` and its `data`; with `names_errors` so is
    an error, which otherwise is the member `error` of a nameless one.
    """

    has_names: bool = False
    names_errors: bool = False
    terminator: bytes = b""

    def frame(self, value: Json) -> bytes:
        """One event."""
        if not self.has_names or not isinstance(value, Mapping):
            return _frame(value)
        return _named(str(value["event"]), value["data"])

    def failure(self, error: Json) -> bytes:
        """The error that ends a stream."""
        return _named("error", error) if self.names_errors else _frame({"error": error})


PLAIN = Framing()
DONE = Framing(terminator=b"data: [DONE]\n\n")
NAMED = Framing(has_names=True)
NAMED_ERRORS = Framing(has_names=True, names_errors=True)


def _frame(value: Json) -> bytes:
    return b"data: " + write(value) + b"\n\n"


def _named(name: str, data: Json) -> bytes:
    return f"event: {name}\n".encode() + _frame(data)


@dataclass(frozen=True)
class EventStream:
    """A response that sends events as they come.

    `frames` yields ready bytes; closing it must end the work behind it. `ping_s` is the silence after which a comment is sent, 0 or less: never.
    """

    frames: AsyncGenerator[bytes, None]
    ping_s: float
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the frames, or the client, end."""
        try:
            with contextlib.suppress(ClientGone):
                async with while_present(receive):
                    await self._send_all(send)
        finally:
            await self.frames.aclose()

    async def _send_all(self, send: Send) -> None:
        raw = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        raw += [(key.encode(), value.encode()) for key, value in self.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async with _Body(send, self.ping_s) as body:
            # The status goes out now, not with the first event.
            await body.send(b"")
            async for data in self.frames:
                await body.send(data)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Body:
    """What goes out piece by piece, with a comment wherever nothing went out for `ping_s`.

    Whatever sends, a piece is written whole. One task pings for all of a stream: waiting for each
    event with a timeout would cost more than sending it.
    """

    def __init__(self, send: Send, ping_s: float) -> None:
        self._send = send
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._pinging: asyncio.Task[None] | None = None

    async def __aenter__(self) -> _Body:
        if self._ping_s > 0:
            self._pinging = asyncio.create_task(self._ping())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pinging is None:
            return
        self._pinging.cancel()
        await asyncio.wait((self._pinging,))
        if not self._pinging.cancelled():
            self._pinging.result()

    async def send(self, data: bytes) -> None:
        """Sends a piece."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_s = self._loop.time()

    async def _ping(self) -> None:
        while True:
            due_s = self._sent_s + self._ping_s
            if self._loop.time() >= due_s:
                await self.send(PING)
            else:
                await asyncio.sleep(due_s - self._loop.time())
