"""Files that are read again when they change: certificates and keys.

A change is seen by device, inode, size and times, so a link that is moved to another file is one
too. What cannot be used leaves in force what was; the log and a counter say so, once per change.
Knows neither a certificate nor a key.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_LOG = logging.getLogger(__name__)
INTERVAL_S = 5.0
_RESULTS = ("ok", "refused")

_Stamp = tuple[tuple[int, int, int, int] | None, ...]


@dataclass(frozen=True)
class Watched:
    """One thing that is read from files.

    `renew` reads and checks them, changing nothing, and returns what puts the result in force; it
    raises OSError or ValueError, whose text names the cause.
    """

    what: str
    files: tuple[str, ...]
    renew: Callable[[], Callable[[], None]]


class Reloads:
    """Looks at watched files now and then."""

    def __init__(self, watched: Sequence[Watched] = ()) -> None:
        """The files have just been read: only what changes from now on counts."""
        self._seen = [(one, _stamp(one.files)) for one in watched]
        self._counts = Counter[tuple[str, str]](
            {(one.what, result): 0 for one in watched for result in _RESULTS}
        )

    def counts(self) -> Sequence[tuple[tuple[str, str], int]]:
        """Returns ((what, "ok" or "refused"), count), sorted."""
        return sorted(self._counts.items())

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
        except (OSError, ValueError) as error:
            if _stamp(one.files) != now:
                return before  # whoever writes them is not done
            _LOG.error("%s: not read again, the old stays in force: %s", one.what, error)
            self._counts[one.what, "refused"] += 1
            return now
        if _stamp(one.files) != now:
            return before
        put_in_force()
        _LOG.info("%s: read again and in force", one.what)
        self._counts[one.what, "ok"] += 1
        return now


def _stamp(files: Sequence[str]) -> _Stamp:
    return tuple(_stamp_of(file) for file in files)


def _stamp_of(file: str) -> tuple[int, int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
