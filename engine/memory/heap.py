"""Memory that nobody uses and that is not the system's again.

Compiled programs are freed by the collector of cycles alone, jax remembers what it traced for
programs that are gone, and the C allocator keeps what they and their compilation took, with glibc
for ever unless asked: some hundred megabytes.
"""

from __future__ import annotations

import gc

import jax

from engine.memory.allocator import trim


def give_back() -> None:
    """Returns it to the system, in some ten milliseconds; any thread may ask."""
    gc.collect()
    trim()


def forget_programs() -> None:
    """Lets go of what jax remembers of programs, those that are in use left out; then gives back.

    Compiled programs that somebody holds go on. What is only called through `jax.jit` is compiled
    anew at its next call, so nothing that serves may be.
    """
    jax.clear_caches()
    give_back()
