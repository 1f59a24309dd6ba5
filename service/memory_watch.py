"""Gives the system back what floods and long requests have left behind.

gRPC keeps what a flood of frames makes it read until it has answered, seconds after the flooder has
gone, and the C allocator keeps that for ever unless asked: 0.4 to 2 GiB. It must not know what the
memory was used for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")
_GROWTH_BYTES = 32 << 20
_INTERVAL_S = 1.0
# So often it is given back once it has grown: what was in use at first is free later.
_ROUNDS = 20


def resident_bytes() -> int | None:
    """Memory of this process that is not swapped out; None where the system does not say so."""
    try:
        num_pages = int(_STATM.read_text().split()[1])
    except FileNotFoundError:
        return None
    return num_pages * os.sysconf("SC_PAGE_SIZE")


async def watch_memory(
    trim: Callable[[], None],
    *,
    resident: Callable[[], int | None] = resident_bytes,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Calls `trim`, on a thread, for a while whenever memory has grown by 32 MiB; never ends."""
    least, num_left = resident(), 0
    while least is not None:
        await sleep(_INTERVAL_S)
        now = resident() or 0
        if now > least + _GROWTH_BYTES:
            least, num_left = now, _ROUNDS
        if num_left:
            num_left -= 1
            await asyncio.to_thread(trim)
            now = resident() or 0
        least = min(least, now)
