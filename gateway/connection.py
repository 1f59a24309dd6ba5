"""One HTTP request as handlers see it: its body, its key, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import peer_json
from gateway.errors import ApiError, ErrorKind, server_fault
from gateway.off_loop import LIGHT, off_loop
from gateway.peer_json import Json
from gateway.presence import ClientGone, while_present

T = TypeVar("T")

MAX_BODY_BYTES = 100 << 20
# The parser gets through so many bytes while others get through one.
_PARSER_PACE = 8
_JSON = "application/json; charset=utf-8"
_UNREAD = object()


class Connection:
    """A request and its client. `stall_s` bounds every wait for its body.

    `body_bytes` is how long the body was, 0 until it is read.
    """

    def __init__(self, request: Request, stall_s: float) -> None:
        self._request = request
        self.stall_s = stall_s
        self.body_bytes = 0
        self._is_read = False
        self._kept: bytes | None = None
        self._value: Any = _UNREAD

    async def body(self) -> bytes:
        """Reads the whole body, or gives away the one that was kept.

        Raises:
            ApiError: it is longer than `MAX_BODY_BYTES`, or the client stopped sending.
            ClientGone: the client left.
        """
        body, self._kept = self._kept, None
        return await self._read(_take_any) if body is None else body

    async def keep_body(self, take: Callable[[int], None]) -> None:
        """Reads the body ahead, for `body` to give; `take` hears of each part's bytes.

        A body that was read before is only told of.

        Raises:
            ApiError: as `body`, or whatever `take` raises.
            ClientGone: the client left.
        """
        if self._is_read:
            take(self.body_bytes)
            return
        self._kept = await self._read(take)

    async def _read(self, take: Callable[[int], None]) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            try:
                async with asyncio.timeout(self.stall_s):
                    message = await self._request.receive()
            except TimeoutError as error:
                raise ApiError(ErrorKind.REQUEST_TIMEOUT, "the body did not arrive") from error
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            self.body_bytes = size
            if size > MAX_BODY_BYTES:
                raise ApiError(
                    ErrorKind.TOO_LARGE, f"the body has more than {MAX_BODY_BYTES} bytes"
                )
            take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                self._is_read = True
                return b"".join(parts)

    async def json(self) -> Any:
        """Reads the body as JSON, the same value each time; what is wrong is the peer's 500.

        Raises:
            ApiError: it is no JSON, too long, or did not arrive.
            ClientGone: the client left.
        """
        if self._value is _UNREAD:
            self._value = await self._parsed(await self.body())
        return self._value

    async def _parsed(self, body: bytes) -> Any:
        weight = len(body) if len(body) > _PARSER_PACE * LIGHT else 0
        try:
            return await off_loop(lambda: peer_json.read(body), weight=weight)
        except peer_json.TooManyParts as error:
            raise ApiError(ErrorKind.TOO_LARGE, str(error)) from error
        except peer_json.UnreadableJson as error:
            raise server_fault(str(error)) from error

    async def while_connected(self, work: Awaitable[T]) -> T:
        """Awaits work, cancelling it when the client leaves. The body must have been read.

        Raises:
            ClientGone: the client left first.
        """
        async with while_present(self._request.receive):
            return await work


def _take_any(num_bytes: int) -> None:
    """Of a request that has a place already."""


def json_response(value: Json, status: int = 200) -> Response:
    """A JSON answer in the peer's form."""
    return Response(peer_json.write(value), status, media_type=_JSON)
