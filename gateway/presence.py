"""Whether a client is still there, told by what its connection has to say.

Work is ended inside its own task: one of its own would be made, waited for and cancelled with every
request, and a burst of requests would reach the service in the order of the loop's turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection; nobody reads an answer."""


@contextlib.asynccontextmanager
async def while_present(receive: Receive) -> AsyncGenerator[None]:
    """Cancels what stands inside when the client leaves. Its body must have been read.

    Raises:
        ClientGone: it has left.
    """
    limit = asyncio.timeout(None)
    try:
        async with limit:
            watching = asyncio.create_task(_watch(receive, limit))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if limit.expired():
            raise ClientGone from None
        raise


async def _watch(receive: Receive, limit: asyncio.Timeout) -> None:
    # A connection that cannot even say so has nobody behind it either.
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
    limit.reschedule(asyncio.get_running_loop().time())
