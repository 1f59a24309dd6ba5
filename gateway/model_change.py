"""Where requests wait while the service changes its model: as many, and as large, as it lets queue.

Everything here runs on the event loop. It must not know a route or how a change is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from kvarts.v1 import model_pb2

from gateway.connection import Connection
from gateway.errors import REASON_HEADER, ApiError, ErrorKind

# A load takes minutes where nothing of it was compiled before; a client is told long before a day.
HOLD_LIMIT_S = 1800.0


class ModelChange:
    """One change after another; requests that wait go on when none is on, whatever came of it.

    `num_told` counts how often a change was said to be on.
    """

    def __init__(self, limit_s: float = HOLD_LIMIT_S) -> None:
        """`limit_s` is the longest that one request waits."""
        self._limit_s = limit_s
        self._is_over = asyncio.Event()
        self._is_over.set()
        self.num_told = 0
        self._max_requests = 0
        self._max_bytes = 0
        self._num_requests = 0
        self._num_bytes = 0

    @property
    def is_on(self) -> bool:
        """Whether the model is being changed."""
        return not self._is_over.is_set()

    @property
    def num_waiting(self) -> int:
        """Requests that wait now."""
        return self._num_requests

    def begin(self, info: model_pb2.ServerInfo) -> None:
        """The old model takes nothing new; `info` is what it told of its queue."""
        self.num_told += 1
        if self.is_on:
            return
        self._max_requests = info.queue_limit
        self._max_bytes = info.queue_limit_bytes
        self._is_over = asyncio.Event()

    def end(self) -> None:
        """Lets all go on that wait."""
        self._is_over.set()

    async def wait(self, connection: Connection) -> None:
        """Reads the body and holds the request until no change is on.

        Raises:
            ApiError: Too many wait already, it takes too long, or the body is refused.
            ClientGone: The client left.
        """
        with self._place() as take:
            await connection.keep_body(take)
            try:
                async with asyncio.timeout(self._limit_s):
                    # The next one may have begun before this request has its turn.
                    while self.is_on:
                        await connection.while_connected(self._is_over.wait())
            except TimeoutError as error:
                raise _later("Loading model", "MODEL_LOADING") from error

    @contextmanager
    def _place(self) -> Generator[Callable[[int], None]]:
        """A place for one request, which tells of each further bytes that it keeps."""
        if self._num_requests >= self._max_requests:
            raise _full(self._num_requests, self._max_requests)
        self._num_requests += 1
        size = 0

        def take(num_bytes: int) -> None:
            nonlocal size
            if self._num_bytes + num_bytes > self._max_bytes:
                raise _full(self._num_bytes + num_bytes, self._max_bytes)
            self._num_bytes += num_bytes
            size += num_bytes

        try:
            yield take
        finally:
            self._num_requests -= 1
            self._num_bytes -= size


def _full(queued: int, limit: int) -> ApiError:
    return _later(f"the queue is full: {queued} queued, limit {limit}", "QUEUE_FULL")


def _later(message: str, reason: str) -> ApiError:
    headers = {REASON_HEADER: reason, "retry-after": "1"}
    return ApiError(ErrorKind.UNAVAILABLE, message, headers=headers)
