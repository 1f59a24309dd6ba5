"""Compiled programs kept on disk, so that a second start compiles nothing.

The cache holds machine code: its folder is private to the user, and each combination of jax and
processor has one of its own, because code compiled for one processor may crash on another that
shares a home.
"""

from __future__ import annotations

import hashlib
import os
import platform
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
    path = Path(folder).expanduser() / _machine_key()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(path, 0o700)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return str(path)


def _machine_key() -> str:
    features = hashlib.sha256(_processor_features().encode()).hexdigest()[:12]
    return f"jax-{version('jax')}-{version('jaxlib')}-{platform.machine()}-{features}"


def _processor_features() -> str:
    """The processor's flags where the kernel tells them, else its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = {line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))}
    return " ".join(sorted(flags)) or platform.processor()
