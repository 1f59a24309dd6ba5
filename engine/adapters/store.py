"""What holds adapters where the model runs: the seam between the loaded set and a device."""

from __future__ import annotations

from typing import Protocol

from engine.adapters.content import AdapterContent


class AdapterStore(Protocol):
    """Banks of a fixed number of places, owned by the engine thread."""

    def write_adapter(self, place: int, content: AdapterContent) -> None:
        """Puts an adapter, which was checked against the model, into a free place."""
        ...

    def clear_adapter(self, place: int) -> None:
        """Makes a place change nothing; what it held may be overwritten."""
        ...
