"""Work whose length a client chooses must not hold up the loop that serves everybody.

This module knows no work; whoever calls it knows how much there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Bytes of a body, or items of a list, that the loop gets through in about a millisecond.
LIGHT = 16_384


async def off_loop(work: Callable[[], T], *, weight: int) -> T:
    """Does work at once if it is light, on a thread if it is not.

    Args:
        work: Touches nothing that the loop changes meanwhile.
        weight: How many bytes or items it goes through, roughly.
    """
    if weight <= LIGHT:
        return work()
    return await asyncio.to_thread(work)
