"""What holds adapters where the model runs: the seam between the loaded set and a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from engine.adapters.content import AdapterContent


class AdapterStore(Protocol):
    """Banks of a fixed number of places, owned by the engine thread."""

    def write_adapter(self, place: int, content: AdapterContent) -> Iterator[int]:
        """Puts an adapter, which was checked against the model, into a free place.

        Piece by piece: yields the bytes of each, and steps may run in between. The place changes
        nothing before all were taken.
        """
        ...

    def clear_adapter(self, place: int) -> None:
        """Makes a place change nothing; what it held may be overwritten."""
        ...
