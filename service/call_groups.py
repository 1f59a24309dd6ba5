"""Calls that are queued as one: none reaches the engine before all of a group are there.

Else the first prompt of a body could have ended before the second arrives, and which slot each gets
would be a matter of luck. Everything here runs on the event loop. It must not know a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import InvalidField
from service.waiting_room import WaitingRoom

# From a group's first call on. The others are on their way with it.
PATIENCE_S = 1.0

_Key = tuple["Queue", Hashable]


class Queue(Protocol):
    """Where calls are queued: an engine."""

    def at_once(self) -> AbstractContextManager[None]:
        """What the block queues is looked at when the block has ended, and no sooner."""
        ...


class Place:
    """One call's part in its group."""

    def __init__(self, group: _Group, room: WaitingRoom, size: int) -> None:
        self._group = group
        self._room = room
        self._size = size
        self._submit: Callable[[], None] | None = None
        self._done = asyncio.get_running_loop().create_future()

    @property
    def is_ready(self) -> bool:
        """Whether it only waits for the others."""
        return self._submit is not None

    async def take(self, submit: Callable[[], None]) -> None:
        """Runs `submit` together with those of the others, in the order of their places.

        Raises:
            QueueFull: Too many calls wait for others.
            Exception: What `submit` raises.
        """
        with self._room.place(self._size):
            self._submit = submit
            self._group.look()
            await self._done

    def go(self) -> None:
        """Queues the call, if it is ready and still wanted."""
        if self._submit is None or self._done.done():
            return
        try:
            self._submit()
        except Exception as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


@dataclass
class _Group:
    """The calls of a group that have come; `is_open` once nobody waits for the others any more."""

    queue: Queue
    num_calls: int
    came: set[int] = field(default_factory=set[int])
    is_open: bool = False
    places: dict[int, Place] = field(default_factory=dict[int, Place])

    @property
    def is_over(self) -> bool:
        """Whether nobody is there and nobody is waited for."""
        return not self.places and (self.is_open or len(self.came) == self.num_calls)

    def look(self) -> None:
        """Queues all that are ready once all are, or have gone."""
        all_came = len(self.came) == self.num_calls
        if self.is_open or (all_came and all(one.is_ready for one in self.places.values())):
            self.open()

    def open(self) -> None:
        """Queues all that are ready, and lets who comes later pass."""
        self.is_open = True
        with self.queue.at_once():
            for _, place in sorted(self.places.items()):
                place.go()


class CallGroups:
    """The groups of which a call is there, or is still waited for."""

    def __init__(self, room: WaitingRoom, patience_s: float = PATIENCE_S) -> None:
        """`room` bounds what waits for others of its group."""
        self._room = room
        self._patience_s = patience_s
        self._groups: dict[_Key, _Group] = {}

    @contextmanager
    def place(
        self, queue: Queue, name: Hashable, *, num_calls: int, index: int, size: int
    ) -> Generator[Place]:
        """Keeps a place for a call of `size` bytes until the block ends.

        Without `take` it is given up.

        Raises:
            InvalidField: Another call of the group has this place, or says that it is larger.
        """
        key = (queue, name)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(queue, num_calls)
            loop = asyncio.get_running_loop()
            loop.call_later(self._patience_s, self._lose_patience, key, group)
        _check(group, num_calls, index)
        place = group.places[index] = Place(group, self._room, size)
        group.came.add(index)
        try:
            yield place
        finally:
            del group.places[index]
            group.look()
            self._forget_if_over(key, group)

    def _lose_patience(self, key: _Key, group: _Group) -> None:
        if not group.is_open:
            group.open()
        self._forget_if_over(key, group)

    def _forget_if_over(self, key: _Key, group: _Group) -> None:
        if group.is_over and self._groups.get(key) is group:
            del self._groups[key]


def _check(group: _Group, num_calls: int, index: int) -> None:
    if num_calls != group.num_calls:
        told = f"{num_calls}, but another call of the group says {group.num_calls}"
        raise InvalidField("group.num_calls", told)
    if index in group.places:
        raise InvalidField("group.index", f"{index} is the place of another call of the group")
