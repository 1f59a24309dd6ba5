"""The calls that are being served, so that a stop can wait until the last of them is gone.

grpc's own stop returns when the connections are done; the tasks of cut calls may still be ending.
Whoever then closes the event loop cancels them a second time, which grpc logs as its own fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc


class OpenCalls(grpc.aio.ServerInterceptor):
    """Remembers the task of every call; it must be the outermost interceptor."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_open(self) -> int:
        """Calls that are being served now."""
        return len(self._tasks)

    # The stub's signature demands that a handler comes back as it went in, message types and all.
    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Takes note of a call; grpc runs its interceptors and its handler in one task."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    async def ended(self, limit_s: float) -> None:
        """Waits until every call that has come has ended, at most so long. It ends none itself."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        # What waits for such a task on grpc's side was woken with us; let it go first.
        await asyncio.sleep(0)
