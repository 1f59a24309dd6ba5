"""The thread limit, seen from a process of its own: the pool is made once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.threads import limit_threads

_COUNT = """
import os
from engine.threads import limit_threads
limit_threads({num})
import jax, jax.numpy as jnp
jax.block_until_ready(jnp.ones((8, 8)) @ jnp.ones((8, 8)))
names = [open(f"/proc/self/task/{{t}}/comm").read() for t in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
@pytest.mark.parametrize("num", [1, 3])
def test_xla_works_with_so_many_threads(num: int) -> None:
    script = _COUNT.format(num=num)
    counted = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(counted.stdout) == num


def test_no_thread_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="0 threads: at least 1"):
        limit_threads(0)
