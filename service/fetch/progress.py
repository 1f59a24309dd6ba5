"""Progress of a download, as a person and as a log want to see it."""

from __future__ import annotations

from typing import TextIO

_MIB = 1 << 20
_STEP = 10


class ProgressLine:
    """Writes a line that rewrites itself on a terminal, else one line per 10 %."""

    def __init__(self, out: TextIO) -> None:
        """Writes to `out`."""
        self._out = out
        self._is_terminal = out.isatty()
        self._shown = -1

    def __call__(self, done: int, total: int | None) -> None:
        """Takes bytes done and in all; see `Progress`."""
        if not total:
            return
        percent = done * 100 // total
        mark = percent if self._is_terminal else percent // _STEP * _STEP
        if mark == self._shown:
            return
        self._shown = mark
        text = f"{done / _MIB:.1f} of {total / _MIB:.1f} MiB ({percent} %)"
        if self._is_terminal:
            self._out.write(f"\r{text}" + ("\n" if done == total else ""))
        else:
            self._out.write(f"{text}\n")
        self._out.flush()
