"""Groups of calls: queued together, in the order of their places, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from engine.errors import InvalidField, QueueFull
from service.call_groups import CallGroups
from service.waiting_room import WaitingRoom

FOR_EVER = 3600.0


@dataclass(eq=False)
class FakeQueue:
    """Keeps what was queued, by the blocks in which it was."""

    blocks: list[list[str]] = field(default_factory=list[list[str]])

    @contextmanager
    def at_once(self) -> Generator[None]:
        self.blocks.append([])
        yield

    def add(self, name: str) -> None:
        self.blocks[-1].append(name)

    @property
    def queued(self) -> list[list[str]]:
        return [block for block in self.blocks if block]


class Calls:
    """Calls of one group, each with a gate that holds it before it is ready."""

    def __init__(
        self, num_calls: int = 2, patience_s: float = FOR_EVER, max_bytes: int = 10
    ) -> None:
        self.queue = FakeQueue()
        self.room = WaitingRoom(max_calls=10, max_bytes=max_bytes)
        self.groups = CallGroups(self.room, patience_s)
        self.num_calls = num_calls

    async def run(
        self, index: int, *, gate: asyncio.Event | None = None, queue: FakeQueue | None = None
    ) -> None:
        queue = queue or self.queue
        place = self.groups.place(queue, "name", num_calls=self.num_calls, index=index, size=1)
        with place as mine:
            if gate is not None:
                await gate.wait()
            await mine.take(lambda: queue.add(str(index)))

    def start(self, index: int, gate: asyncio.Event | None = None) -> asyncio.Task[None]:
        return asyncio.create_task(self.run(index, gate=gate))


async def turns() -> None:
    """Lets every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_they_are_queued_in_one_block_in_the_order_of_their_places() -> None:
    calls = Calls(3)
    running = [calls.start(2), calls.start(0)]
    await turns()
    assert calls.queue.queued == []
    await asyncio.gather(*running, calls.start(1))
    assert calls.queue.queued == [["0", "1", "2"]]


async def test_one_that_is_there_but_not_ready_is_waited_for() -> None:
    calls, gate = Calls(), asyncio.Event()
    running = [calls.start(0, gate), calls.start(1)]
    await turns()
    assert calls.queue.queued == []
    gate.set()
    await asyncio.gather(*running)
    assert calls.queue.queued == [["0", "1"]]


async def test_one_that_is_refused_or_cancelled_is_not() -> None:
    calls, gate = Calls(), asyncio.Event()
    refused, other = calls.start(0, gate), calls.start(1)
    await turns()
    refused.cancel()
    await other
    assert calls.queue.queued == [["1"]]


async def test_one_that_is_refused_before_the_others_come_is_not_waited_for() -> None:
    calls = Calls()
    with calls.groups.place(calls.queue, "name", num_calls=2, index=0, size=1):
        pass
    await asyncio.wait_for(calls.run(1), 30)
    assert calls.queue.queued == [["1"]]


async def test_who_gives_up_while_it_waits_is_not_queued_and_may_come_again() -> None:
    calls = Calls()
    gone = calls.start(0)
    await turns()
    gone.cancel()
    await turns()
    again = calls.start(0)
    await turns()
    assert calls.queue.queued == []
    await asyncio.gather(again, calls.start(1))
    assert calls.queue.queued == [["0", "1"]]
    assert calls.room.num_calls == 0


async def test_a_group_that_is_over_is_forgotten() -> None:
    calls = Calls()
    for _ in range(2):
        await asyncio.gather(calls.start(0), calls.start(1))
    assert calls.queue.queued == [["0", "1"], ["0", "1"]]


async def test_what_waits_for_others_is_bounded() -> None:
    calls = Calls(3, max_bytes=1)
    waiting = calls.start(0)
    await turns()
    with pytest.raises(QueueFull):
        await calls.run(1)
    waiting.cancel()
    await turns()
    assert calls.room.num_calls == 0


async def test_patience_has_an_end_and_who_comes_later_passes() -> None:
    calls, gate = Calls(3, patience_s=0.0), asyncio.Event()
    late = calls.start(2, gate)
    await asyncio.wait_for(calls.run(0), 30)
    assert calls.queue.queued == [["0"]]
    await asyncio.wait_for(calls.run(1), 30)
    gate.set()
    await late
    assert calls.queue.queued == [["0"], ["1"], ["2"]]


async def test_a_refusal_of_the_queue_is_its_own() -> None:
    calls = Calls()

    async def refused() -> None:
        with calls.groups.place(calls.queue, "name", num_calls=2, index=0, size=1) as place:
            await place.take(fail)

    def fail() -> None:
        raise QueueFull(8, 8)

    outcome = await asyncio.gather(refused(), calls.run(1), return_exceptions=True)
    assert isinstance(outcome[0], QueueFull)
    assert calls.queue.queued == [["1"]]


async def test_groups_of_two_queues_are_two() -> None:
    calls, other = Calls(), FakeQueue()
    running = [calls.start(0), asyncio.create_task(calls.run(1, queue=other))]
    await turns()
    assert calls.queue.queued == other.queued == []
    await asyncio.gather(*running, calls.start(1), calls.run(0, queue=other))
    assert calls.queue.queued == other.queued == [["0", "1"]]


async def test_a_place_is_given_once_and_all_say_the_same_size() -> None:
    calls = Calls()
    with calls.groups.place(calls.queue, "name", num_calls=2, index=0, size=1):
        with (
            pytest.raises(InvalidField, match=r"group\.index: 0 is the place of another call"),
            calls.groups.place(calls.queue, "name", num_calls=2, index=0, size=1),
        ):
            pass
        with (
            pytest.raises(InvalidField, match=r"group\.num_calls: 3, but another call .* says 2"),
            calls.groups.place(calls.queue, "name", num_calls=3, index=1, size=1),
        ):
            pass
