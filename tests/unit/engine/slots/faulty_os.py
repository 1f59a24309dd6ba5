"""An operating system whose calls fail: for the modules that write and read slot files."""

from __future__ import annotations

import os
from typing import Any

CALLS = ("open", "pwrite", "fsync", "rename", "fstat", "preadv")


class FaultyOs:
    """The os module, of which the n-th of some calls fails: once, or from then on."""

    def __init__(self, number: int, at: int, *, for_ever: bool) -> None:
        self.number, self.at, self.for_ever = number, at, for_ever
        self.calls: list[str] = []
        self.has_failed = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            place = len(self.calls)
            self.calls.append(name)
            if place == self.at or (self.for_ever and place > self.at):
                self.has_failed = True
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **kwargs)

        return call
