"""What processes hold, as Linux tells it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.soak.judge import Usage

_PROC = Path("/proc")


def usage(pids: list[int]) -> Usage:
    """Of all of `pids` together; one that has ended holds nothing."""
    rss = files = threads = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = _fields(pid)
            rss += 1024 * int(fields.get("VmRSS", "0 kB").split()[0])
            threads += int(fields["Threads"])
            files += sum(1 for _ in (_PROC / str(pid) / "fd").iterdir())
    return Usage(rss, files, threads)


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, in no order."""
    parents: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parents[int(folder.name)] = int(_fields(int(folder.name))["PPid"])
    found, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return sorted(found)


def _fields(pid: int) -> dict[str, str]:
    lines = (_PROC / str(pid) / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
