"""Memory that can still be had, as the system tells it: of the machine, and of the control group.

Source: proc_meminfo(5) MemAvailable; the kernel's cgroup-v2 documentation, memory.max,
memory.current and memory.stat.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """Returns what the process may still take, None where the system does not tell."""
    machine = _available_of_machine(meminfo)
    if machine is None:
        return None
    limited = _available_of_group(group)
    return machine if limited is None else min(machine, limited)


def _available_of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(words[1]) << 10 for words in found), None)


def _available_of_group(group: Path) -> int | None:
    """None where there is no limit. Pages of files count as free: the kernel takes those first."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text())
        stat = (group / "memory.stat").read_text().split()
    except OSError:
        return None
    cached = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
    return max(0, int(limit) - used + cached)
