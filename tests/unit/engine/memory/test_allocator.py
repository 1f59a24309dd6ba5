"""What glibc is told, in a process of its own: it cannot be taken back."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# A barrier holds every thread until all have taken memory, so that none can use another's heap.
_CHILD = """
import ctypes, json, re, sys, threading
from engine.memory.allocator import limit_heaps

if sys.argv[2] == "limited":
    limit_heaps()
libc = ctypes.CDLL(None)
for call in (libc.malloc, libc.fopen):
    call.restype = ctypes.c_void_p
taken = threading.Barrier(12)

def take():
    libc.malloc(ctypes.c_size_t(1000))
    taken.wait()

threads = [threading.Thread(target=take) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(30 << 20))))
libc.malloc(ctypes.c_size_t(8 << 20))
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
told = open(sys.argv[1]).read()
mapped = int(re.findall(r'type="mmap" count="\\d+" size="(\\d+)"', told)[-1])
print(json.dumps([told.count("<heap "), mapped]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
@pytest.mark.parametrize("is_limited", [True, False])
def test_two_heaps_and_large_arrays_outside_of_them(is_limited: bool, tmp_path: Path) -> None:
    argument = "limited" if is_limited else "default"
    command = [sys.executable, "-c", _CHILD, str(tmp_path / "told.xml"), argument]
    reply = subprocess.run(command, check=True, capture_output=True, timeout=60)
    num_heaps, mapped_bytes = json.loads(reply.stdout)
    assert (num_heaps <= 2) == is_limited
    # By default a block of 30 MiB that is freed keeps later ones of 8 MiB in a heap.
    assert (mapped_bytes >= 8 << 20) == is_limited
