"""What the C allocator keeps of memory that was freed, which glibc does for ever unless asked.

A compilation leaves some hundred megabytes of it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Returns it to the system, in some ten milliseconds; any thread may ask."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """Glibc's own call; other allocators have none and need none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
