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

    def __init__(self, group: _Group) -> None:
        self._group = group
        self._submit: Callable[[], None] | None = None
        self._done = asyncio.get_running_loop().create_future()

    @property
    def is_ready(self) -> bool:
        """Whether it only waits for the others."""
        return self._submit is not None

    async def take(self, submit: Callable[[], None]) -> None:
        """Runs `submit` together with those of the others, in the order of their places.

        Raises:
            Exception: What `submit` raises.
        """
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
    patience_s: float
    num_come: int = 0
    is_open: bool = False
    places: dict[int, Place] = field(default_factory=dict[int, Place])

    def __post_init__(self) -> None:
        self._patience = asyncio.get_running_loop().call_later(self.patience_s, self.open)

    def look(self) -> None:
        """Queues all that are ready once all are, or have gone."""
        all_came = self.num_come >= self.num_calls
        if self.is_open or (all_came and all(one.is_ready for one in self.places.values())):
            self.open()

    def open(self) -> None:
        """Queues all that are ready, and lets who comes later pass."""
        self.is_open = True
        self._patience.cancel()
        with self.queue.at_once():
            for _, place in sorted(self.places.items()):
                place.go()


class CallGroups:
    """The groups of which a call is there."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._groups: dict[_Key, _Group] = {}

    @contextmanager
    def place(
        self, queue: Queue, name: Hashable, *, num_calls: int, index: int
    ) -> Generator[Place]:
        """Keeps a call's place in its group until the block ends; without `take` it is given up.

        Raises:
            InvalidField: Another call of the group has this place, or says that it is larger.
        """
        key = (queue, name)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(queue, num_calls, self._patience_s)
        _check(group, num_calls, index)
        place = group.places[index] = Place(group)
        group.num_come += 1
        try:
            yield place
        finally:
            del group.places[index]
            if group.places:
                group.look()
            else:
                group.open()
                del self._groups[key]


def _check(group: _Group, num_calls: int, index: int) -> None:
    if num_calls != group.num_calls:
        told = f"{num_calls}, but another call of the group says {group.num_calls}"
        raise InvalidField("group.num_calls", told)
    if index in group.places:
        raise InvalidField("group.index", f"{index} is the place of another call of the group")
