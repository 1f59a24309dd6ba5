"""Counts how long steps take, in classes of duration."""

from __future__ import annotations

from bisect import bisect_left

from engine.types import STEP_BOUNDS_S, StepTimes


class StepTimer:
    """A histogram of durations; they are seconds on whatever clock the caller reads."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float) -> None:
        """Counts one step."""
        self._counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        self._total_s += seconds

    @property
    def times(self) -> StepTimes:
        """All steps so far."""
        return StepTimes(tuple(self._counts), self._total_s)
