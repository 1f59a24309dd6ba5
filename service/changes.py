"""Changes of what is served that must not meet: adapters and pools beside a change of the model.

A model is loaded with the adapters of the one before, so nothing may change them meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from service.swap_errors import ModelSwapBusy


class Changes:
    """Which changes run. Changes of adapters and pools go side by side, one of the model alone."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._is_swapping = False

    @contextmanager
    def change(self, what: str) -> Generator[None]:
        """Runs a change of `what`, as a refusal names it, in the block.

        Raises:
            ModelSwapBusy: The model is being changed.
        """
        if self._is_swapping:
            raise ModelSwapBusy("another model is being loaded")
        self._running.append(what)
        try:
            yield
        finally:
            self._running.remove(what)

    @contextmanager
    def swap(self) -> Generator[None]:
        """Changes the model in the block.

        Raises:
            ModelSwapBusy: It is being changed, or something that it takes over is.
        """
        if self._is_swapping:
            raise ModelSwapBusy("another model is being loaded")
        if self._running:
            raise ModelSwapBusy(f"{self._running[0]} are being changed")
        self._is_swapping = True
        try:
            yield
        finally:
            self._is_swapping = False
