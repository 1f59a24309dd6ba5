"""Files that are read again when they change: certificates and keys.

A change is seen by device, inode, size and times, so a link that is moved to another file is one
too. What cannot be used leaves in force what was; the log and a counter say so, once per change.
Knows neither a certificate nor a key.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_LOG = logging.getLogger("kvarts.service")
INTERVAL_S = 5.0

_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class ReloadRefused(Exception):
    """The files, as they are now, cannot be used; the message names file and cause."""


@dataclass(frozen=True)
class Watched:
    """One thing that is read from files.

    `renew` reads and checks them, changing nothing, and returns what puts the result in force; it
    raises ReloadRefused.
    """

    what: str
    files: tuple[str, ...]
    renew: Callable[[], Callable[[], None]]


class Reloads:
    """Looks at watched files now and then. `count` is told (what, "ok" or "refused")."""

    def __init__(self, watched: Sequence[Watched], count: Callable[[str, str], None]) -> None:
        """The files have just been read: only what changes from now on counts."""
        self._seen = [(one, _stamp(one.files)) for one in watched]
        self._count = count

    def look(self) -> None:
        """Reads again what has changed; blocks for as long as files take."""
        self._seen = [(one, self._renewed(one, stamp)) for one, stamp in self._seen]

    async def watch(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Looks again and again; ends only where there is nothing to look at."""
        while self._seen:
            await sleep(INTERVAL_S)
            await asyncio.to_thread(self.look)

    def _renewed(self, one: Watched, before: _Stamp) -> _Stamp:
        now = _stamp(one.files)
        if now == before:
            return before
        try:
            put_in_force = one.renew()
        except ReloadRefused as refused:
            if _stamp(one.files) != now:
                return before  # whoever writes them is not done
            _LOG.error("%s: not read again, the old stays in force: %s", one.what, refused)
            self._count(one.what, "refused")
            return now
        if _stamp(one.files) != now:
            return before
        put_in_force()
        _LOG.info("%s: read again and in force", one.what)
        self._count(one.what, "ok")
        return now


def _stamp(files: Sequence[str]) -> _Stamp:
    return tuple(_stamp_of(file) for file in files)


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
