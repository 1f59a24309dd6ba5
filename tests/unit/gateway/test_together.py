"""Several awaits at once: the first failure ends the others, and comes as it is."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import ApiError, invalid
from gateway.together import together


async def test_a_failure_ends_the_others() -> None:
    ended = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def failing() -> None:
        await asyncio.sleep(0)
        raise invalid("no")

    async def both() -> None:
        async with together() as works:
            works.create_task(endless())
            works.create_task(failing())

    with pytest.raises(ApiError, match="no"):
        await both()
    assert ended.is_set()


async def test_what_stands_inside_may_fail_too() -> None:
    async def inside() -> None:
        async with together():
            raise invalid("no")

    with pytest.raises(ApiError, match="no"):
        await inside()


async def test_who_is_cancelled_cancels_all() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def both() -> None:
        async with together() as works:
            works.create_task(endless())

    task = asyncio.create_task(both())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
