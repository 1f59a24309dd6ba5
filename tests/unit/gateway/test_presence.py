"""Work for a client that may leave."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from gateway.presence import ClientGone, while_present


class Line:
    """What a connection tells of its client."""

    def __init__(self) -> None:
        self._messages = asyncio.Queue[Message | Exception]()

    def tell(self, kind: str) -> None:
        self._messages.put_nowait({"type": kind})

    def fail(self) -> None:
        self._messages.put_nowait(OSError("no such connection"))

    async def receive(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message


async def test_work_is_done_in_the_task_that_waits_for_it() -> None:
    line = Line()
    async with while_present(line.receive):
        own = asyncio.current_task()
        line.tell("http.request")
        await asyncio.sleep(0)
        assert asyncio.current_task() is own
    # Nothing reads the connection any more.
    line.tell("http.disconnect")
    assert (await line.receive())["type"] == "http.disconnect"


async def test_a_client_that_leaves_ends_the_work_before_anybody_hears_of_it() -> None:
    line = Line()
    heard: list[str] = []

    async def work() -> None:
        try:
            line.tell("http.request")
            line.tell("http.disconnect")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            heard.append("ended")

    with pytest.raises(ClientGone):
        async with while_present(line.receive):
            await work()
    assert heard == ["ended"]
    # The task itself is not cancelled.
    await asyncio.sleep(0)


async def test_a_connection_that_fails_has_nobody_behind_it() -> None:
    line = Line()
    line.fail()
    with pytest.raises(ClientGone):
        async with while_present(line.receive):
            await asyncio.Event().wait()


async def test_what_fails_or_is_late_inside_says_so_itself() -> None:
    line = Line()
    with pytest.raises(TimeoutError):
        async with while_present(line.receive), asyncio.timeout(0):
            await asyncio.Event().wait()
    with pytest.raises(ValueError, match="no"):
        async with while_present(line.receive):
            raise ValueError("no")


async def test_a_cancel_from_outside_stays_one() -> None:
    line = Line()

    async def work() -> None:
        async with while_present(line.receive):
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
