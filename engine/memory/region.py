"""Memory of the process that is given back to the system in parts, which no numpy array can do.

Pages come from the system as they are first written and are zeros until then.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

# A call to the system for less than this is not worth its time.
_LEAST_RELEASED_BYTES = 1 << 20


class Region:
    """`data` is uint8 [nbytes], its first byte on a page; the memory lives as long as any view."""

    def __init__(self, nbytes: int) -> None:
        """Maps zeros.

        Raises:
            MemoryError: There is no room for them.
        """
        self._released = 0
        if nbytes == 0:
            self._map, self.data = None, np.zeros(0, np.uint8)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(f"{nbytes} bytes cannot be mapped") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE, 0, nbytes)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release_until(self, end: int) -> None:
        """Gives everything before byte `end` back; what it held is lost."""
        end -= end % mmap.PAGESIZE
        if self._map is None or end - self._released < _LEAST_RELEASED_BYTES:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            self._advise(mmap.MADV_DONTNEED, self._released, end - self._released)
        self._released = end

    def _advise(self, advice: int, start: int, length: int) -> None:
        assert self._map is not None
        try:
            self._map.madvise(advice, start, length)
        except OSError:
            # Advice only: a kernel without it keeps the pages until the whole region goes.
            return
