"""The bound on each of many waits for a reader."""

from __future__ import annotations

import asyncio

import pytest

from service.stall import Stall


async def test_a_wait_that_takes_too_long_ends_the_block():
    stall = Stall(0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30), stall:
            await stall.wait(asyncio.Event().wait())
    assert stall.has_ended


async def test_waits_count_alone_and_what_is_between_them_does_not():
    loop, limit_s = asyncio.get_running_loop(), 0.02
    stall = Stall(limit_s)
    async with stall:
        begun_s = loop.time()
        while loop.time() < begun_s + 3 * limit_s:
            assert await stall.wait(asyncio.sleep(0, "written")) == "written"
        await asyncio.sleep(3 * limit_s)
    assert not stall.has_ended


async def test_a_wait_after_many_is_still_cut_off():
    stall = Stall(0.01)

    async def later() -> None:
        await asyncio.sleep(0.03)
        await stall.wait(asyncio.Event().wait())

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30), stall:
            await later()
    assert stall.has_ended


async def test_another_timeout_is_not_its_own():
    stall = Stall(30)
    with pytest.raises(TimeoutError, match="of somebody else"):
        async with stall:
            raise TimeoutError("of somebody else")
    assert not stall.has_ended
    # Nothing is left that could cancel this task.
    await asyncio.sleep(0)
