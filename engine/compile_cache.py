"""Compiled programs kept on disk, so that a second start compiles nothing.

The cache holds machine code: its folder is private to the user, and each combination of jax and
processor has one of its own, because code compiled for one processor may crash on another that
shares a home.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import jax


def enable_compile_cache(folder: str) -> str:
    """Keeps every compiled program under `folder`; for the whole process, before any compile.

    Returns:
        The folder of this jax on this processor.

    Raises:
        OSError: It cannot be made.
    """
    path = Path(folder).expanduser() / _this_machine()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(path, 0o700)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return str(path)


def machine_key(versions: Sequence[str], machine: str, features: str) -> str:
    """Names the folder of some versions of jax on one kind of processor."""
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return "-".join(["jax", *versions, machine, digest])


def processor_features(cpuinfo: str) -> str:
    """The processor's flags out of the text of /proc/cpuinfo; "" where there are none.

    Cores of different kinds count with all their flags; clock speeds and the like do not count.
    """
    lines = cpuinfo.splitlines()
    flags = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    return " ".join(sorted(flags))


def _this_machine() -> str:
    versions = (version("jax"), version("jaxlib"))
    try:
        features = processor_features(Path("/proc/cpuinfo").read_text())
    except OSError:
        features = ""
    return machine_key(versions, platform.machine(), features or platform.processor())
