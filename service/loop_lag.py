"""How late the event loop is: what holds it up holds up every stream and every probe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# Often enough to meet a stall of a tenth of a second, too seldom to be felt.
INTERVAL_S = 0.25


async def watch_loop_lag(
    observe: Callable[[float], None],
    *,
    interval_s: float = INTERVAL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Sleeps again and again and reports how many seconds too long each sleep took; never ends."""
    while True:
        began_s = clock()
        await sleep(interval_s)
        observe(max(0.0, clock() - began_s - interval_s))
