"""Connections that cannot be taken: said once a minute, not once a try.

The event loop tries a listener's whole backlog whenever it is full of clients and the process has no
descriptor left, and reports each try with a traceback: a hundred thousand lines in seconds.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

_LOG = logging.getLogger("gateway")
# Source: asyncio, which tries again after a second for these.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_REMIND_S = 60.0


class AcceptFaults:
    """An event loop's handler of exceptions; all others are reported as the loop would."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Told by the loop of what nobody caught."""
        error = context.get("exception")
        is_accept = "socket" in context and "transport" not in context
        if not (is_accept and isinstance(error, OSError) and error.errno in _EXHAUSTED):
            loop.default_exception_handler(dict(context))
            return
        now_s = self._clock()
        if self._told_s is None or now_s - self._told_s >= _REMIND_S:
            self._told_s = now_s
            _LOG.error("new connections must wait: %s", error.strerror)
