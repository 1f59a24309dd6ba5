"""Both processes keep their loops free in the same way; neither may import the other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from types import ModuleType

import pytest

from gateway import off_loop as of_gateway
from service import off_loop as of_service

MODULES = pytest.mark.parametrize("module", [of_gateway, of_service])


class Lane:
    """Heavy work that lasts until `free` is set; `has_begun` once it is there."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.free = threading.Event()

    def work(self) -> str:
        self.has_begun.set()
        assert self.free.wait(60)
        return threading.current_thread().name


@contextlib.asynccontextmanager
async def taken(module: ModuleType) -> AsyncGenerator[Lane]:
    """The one lane, with work in it."""
    lane = Lane()
    first = asyncio.create_task(module.off_loop(lane.work, weight=module.HEAVY + 1))
    try:
        await asyncio.to_thread(lane.has_begun.wait, 60)
        yield lane
    finally:
        lane.free.set()
        assert (await first).startswith("heavy")


@MODULES
async def test_light_work_is_done_at_once_where_it_is_asked_for(module: ModuleType) -> None:
    async with taken(module):
        here = await module.off_loop(threading.current_thread, weight=module.LIGHT)
    assert here is threading.current_thread()


@MODULES
async def test_what_is_not_heavy_waits_for_nothing_heavy(module: ModuleType) -> None:
    async with taken(module):
        there = await module.off_loop(threading.current_thread, weight=module.HEAVY)
        assert there is not threading.current_thread()


@MODULES
async def test_heavy_work_is_done_one_after_another_in_its_order(module: ModuleType) -> None:
    begun: list[int] = []
    async with taken(module) as lane:
        asked = [
            asyncio.create_task(
                module.off_loop(lambda n=n: begun.append(n), weight=module.HEAVY + 1)
            )
            for n in range(8)
        ]
        # A thread of its own would have begun one of them by now, or after any other pause.
        await asyncio.to_thread(lambda: None)
        assert not begun
        lane.free.set()
        await asyncio.gather(*asked)
    assert begun == list(range(8))


@MODULES
async def test_heavy_work_that_nobody_waits_for_any_more_is_not_begun(module: ModuleType) -> None:
    begun: list[int] = []
    async with taken(module) as lane:
        given_up, wanted = (
            asyncio.create_task(
                module.off_loop(lambda n=n: begun.append(n), weight=module.HEAVY + 1)
            )
            for n in range(2)
        )
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        lane.free.set()
        await wanted
    assert begun == [1]


@MODULES
@pytest.mark.parametrize("length", [0, 1, 65_536, 65_537, 200_001])
def test_pieces_come_to_the_whole(module: ModuleType, length: int) -> None:
    filled: list[int] = [7]
    module.extend(filled, range(length))
    assert filled == [7, *range(length)]
