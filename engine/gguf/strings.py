"""Many byte strings in one: a vocabulary of 262,144 pieces takes 4 MB so, as objects 15.

Knows no encoding and no file.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import cast, overload

import numpy as np


class Strings(Sequence[bytes]):
    """Byte strings end to end, each cut out when it is asked for. Never changed once made.

    Equal to any sequence of the same bytes.
    """

    __slots__ = ("_bytes", "_ends")

    def __init__(self, strings: Iterable[bytes] = ()) -> None:
        joined = bytearray()
        # The first end is where string 0 begins. 64 bits: a file's strings may be longer than 4 GiB.
        ends = array("Q", (0,))
        for string in strings:
            joined += string
            ends.append(len(joined))
        self._bytes = bytes(joined)
        self._ends = ends

    @property
    def has_empty(self) -> bool:
        """Whether one of them is empty."""
        ends = np.frombuffer(self._ends, np.uint64)
        return bool((ends[1:] == ends[:-1]).any())

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Strings: ...
    def __getitem__(self, index: int | slice) -> bytes | Strings:
        if isinstance(index, slice):
            return Strings(self[place] for place in range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
            if index < 0:
                raise IndexError(f"there are {len(self)} strings, not {len(self) - index}")
        return self._bytes[self._ends[index] : self._ends[index + 1]]

    def __iter__(self) -> Iterator[bytes]:
        return map(self._bytes.__getitem__, map(slice, self._ends, self._ends[1:]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        others = cast("Sequence[object]", other)
        return len(self) == len(others) and all(
            one == another for one, another in zip(self, others, strict=True)
        )

    def __repr__(self) -> str:
        return f"Strings({list(self)!r})"
