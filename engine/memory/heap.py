"""Memory that nobody uses and that is not the system's again.

Compiled programs are freed by the collector of cycles alone, jax remembers what it traced for
programs that are gone, and the C allocator keeps what they and their compilation took, with glibc
for ever unless asked: some hundred megabytes.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable

import jax


def give_back() -> None:
    """Returns it to the system, in some ten milliseconds; any thread may ask."""
    gc.collect()
    trim()


def trim() -> None:
    """Returns what is freed already, in a few milliseconds; any thread may ask."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


def forget_programs() -> None:
    """Lets go of what jax remembers of programs, those that are in use left out; then gives back.

    Compiled programs that somebody holds go on. What is only called through `jax.jit` is compiled
    anew at its next call, so nothing that serves may be.
    """
    jax.clear_caches()
    give_back()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Glibc's own call; other allocators have none and need none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
