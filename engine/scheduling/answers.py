"""Answers that wait until everybody can see what they tell of.

Who hears that its slot was saved must not find it in transfer in the next snapshot, so that an
outcome is kept until the step's snapshot is there. Knows nothing of what is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class Answers:
    """The outcomes of one step, in their order; for the engine thread alone."""

    def __init__(self) -> None:
        self._kept: list[Callable[[], None]] = []

    def keep(self, done: Future[Result], result: Result) -> None:
        """Keeps the result of a future that runs already: nobody can cancel it any more."""
        self._kept.append(partial(done.set_result, result))

    def keep_if_wanted(self, done: Future[Result], result: Result) -> None:
        """Keeps the result of a future that its owner may have cancelled before."""
        if done.set_running_or_notify_cancel():
            self.keep(done, result)

    def keep_error(self, done: Future[Any], error: Exception) -> None:
        """Keeps what a future that runs already fails with."""
        self._kept.append(partial(done.set_exception, error))

    def tell(self) -> None:
        """Settles the futures; call it once the snapshot shows what they tell of."""
        kept, self._kept = self._kept, []
        for settle in kept:
            settle()
