"""How many threads XLA's CPU backend works with, native kernels included.

Source: the default size of its thread pool, which XLA takes from `NPROC` when that is set and from
the scheduler's affinity otherwise. The pool is made with the backend and never changes size.
"""

from __future__ import annotations

import os


def limit_threads(num_threads: int) -> None:
    """Sets the size of the pool; for the whole process, before jax is first used.

    Raises:
        ValueError: `num_threads` is not positive.
    """
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads: at least 1 is needed")
    os.environ["NPROC"] = str(num_threads)
