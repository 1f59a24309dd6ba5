"""Several awaits at once, of which the first that fails ends the others.

What `asyncio.gather` leaves running when it fails goes on for a client that has its answer already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


@asynccontextmanager
async def together() -> AsyncGenerator[asyncio.TaskGroup]:
    """A group that is waited for at its end.

    Raises:
        Exception: the first that one of them, or what stands inside, raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
