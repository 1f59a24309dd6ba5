"""Waiting for what no event announces, in another process or behind an API: read until it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# Hang guards, not expectations.
PATIENCE_S = 60.0
_POLL_S = 0.01


async def until(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Reads again and again until the value is as wanted; returns it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds(value := await read()):
        assert time.monotonic() < deadline_s, f"still: {value}"
        await asyncio.sleep(_POLL_S)
    return value


async def until_so(holds: Callable[[], bool]) -> None:
    """Asks again and again until it holds."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it still does not hold"
        await asyncio.sleep(_POLL_S)
