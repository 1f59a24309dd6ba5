"""A file read by ranges, never mapped: who cuts it short meanwhile gets an error, and no signal.

Adapters are read while the server runs, from a folder that others write to. A mapped page that is
gone when it is touched would end the process.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from engine.adapters.errors import AdapterFileInvalid
from engine.gguf.stamp import FileStamp


class RegularFile:
    """An open file; a context manager. `name` stands in its errors."""

    def __init__(self, path: Path, name: str) -> None:
        """Opens it without waiting for anything.

        Raises:
            AdapterFileInvalid: It is no regular file, or cannot be read.
        """
        self.name = name
        try:
            # Not to wait for the writer of a FIFO; for regular files it means nothing.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed(error) from error
        self.stamp = FileStamp.of(os.path.abspath(path), self._descriptor)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.close()
            raise AdapterFileInvalid(name, "not a regular file")

    @property
    def size(self) -> int:
        """Bytes, when it was opened."""
        return self.stamp.size

    def read(self, start: int, length: int) -> npt.NDArray[np.uint8]:
        """Returns bytes of it, which nobody else holds.

        Raises:
            AdapterFileInvalid: They are not there any more, or the disk fails.
        """
        held = np.empty(length, np.uint8)
        view, done = held.data, 0
        while done < length:
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise self._failed(error) from error
            if not count:
                raise AdapterFileInvalid(self.name, "was cut short while it was read")
            done += count
        return held

    def close(self) -> None:
        """Closes it."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _failed(self, error: OSError) -> AdapterFileInvalid:
        reason = error.strerror or type(error).__name__
        return AdapterFileInvalid(self.name, f"cannot be read: {reason}")
