"""How much glibc's allocator keeps of what was freed. Imports nothing that starts a thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_ARENAS = 2
_KEPT_BYTES = 12 << 20
_MAPPED_BYTES = 4 << 20


def limit_heaps() -> None:
    """Lets all threads share two heaps, and gives large arrays back where they are freed.

    To be called before there are other threads: a heap stays. By default there are eight for every
    core, and what a step takes for its results, megabytes where a vocabulary is large, is kept by
    the heap of the thread that took it. That much a heap does keep: giving it back after every
    step costs a tenth of a decode. Where there is no glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    mallopt(_M_ARENA_MAX, _ARENAS)
    # Left alone, both grow with the arrays that are freed, to 32 and to 64 MiB.
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim() -> None:
    """Returns what is freed already, in a few milliseconds; any thread may ask."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Glibc's own call; other allocators have none and need none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
