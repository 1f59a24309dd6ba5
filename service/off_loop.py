"""Work whose length a client chooses must not hold up the loop that serves everybody.

A thread alone does not help: a parser or a copy of many megabytes keeps the interpreter's lock until
it is done, and several threads that take turns at the lock leave the loop one turn in many. Heavy
work is therefore done one piece after another, in the whole process, and the loop gets its turn after
each long call. What a message holds is measured by the bytes that it came in. This module knows no
work; whoever calls it knows how much there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Bytes of a text, or items of a list, that the loop gets through in well under a millisecond.
LIGHT = 1024
# From here on one at a time.
HEAVY = 1 << 20
# Items that one call copies, in about a millisecond.
_PIECE = 1 << 16
# Of the process, as the interpreter's lock is.
_LANE = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heavy")


async def off_loop(work: Callable[[], T], *, weight: int) -> T:
    """Does work at once if it is light, on a thread if it is not, in its turn if it is heavy.

    Whoever is cancelled while it waits for its turn gives that up.

    Args:
        work: Touches nothing that the loop changes meanwhile, and no context variable.
        weight: How many bytes or items it goes through, roughly.
    """
    return work() if weight <= LIGHT else await on_thread(work, weight=weight)


async def on_thread(work: Callable[[], T], *, weight: int) -> T:
    """The same of work that takes a thread whatever its weight."""
    if weight <= HEAVY:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_LANE, work)


def in_pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields the items of a message's list, which is read in one go only as far as a piece goes."""
    for start in range(0, len(items), _PIECE):
        yield items[start : start + _PIECE]


def extend(into: MutableSequence[T], items: Sequence[T]) -> None:
    """Fills a message's list, piece by piece."""
    for piece in in_pieces(items):
        into.extend(piece)
