"""Which file on disk something was read from, so that a later look can tell whether it is the same.

Knows nothing of GGUF.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class FileStamp:
    """A file as the system knows it; times are ns. A write, a rename or a new file changes it."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str, descriptor: int) -> FileStamp:
        """Takes the stamp of an open file.

        Raises:
            OSError: The descriptor is not open.
        """
        status = os.fstat(descriptor)
        return cls(
            path,
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
