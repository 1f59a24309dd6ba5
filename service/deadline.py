"""Why a client went away: because it chose to, or because its deadline passed.

A client whose deadline passes resets the stream, which looks like any other goodbye; only the time
at which it comes tells the two apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import grpc

from engine.types import CancelCause

# Source: gRPC rounds a timeout up by at most 1 % to write it into its header, and a request is on
# its way for a while: the client's clock rings first.
_ROUNDING = 0.01
_TRAVEL_S = 0.05


class CallDeadline:
    """The deadline of one call, seen from its arrival."""

    def __init__(
        self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts counting; `timeout_s` is what the call has left, None for ever."""
        self._clock = clock
        self._rings_s = (
            None
            if timeout_s is None
            else clock() + max(0.0, timeout_s * (1 - _ROUNDING) - _TRAVEL_S)
        )

    @classmethod
    def of(
        cls,
        context: grpc.aio.ServicerContext[Any, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> CallDeadline:
        """Returns the deadline of a call that has just arrived."""
        # The stub promises a float; a call without a deadline answers None.
        return cls(cast("float | None", context.time_remaining()), clock)

    @property
    def has_rung(self) -> bool:
        """Whether a client that goes away now does so because its time is over."""
        return self._rings_s is not None and self._clock() >= self._rings_s

    def cause(self) -> CancelCause:
        """Why a client goes away now."""
        return CancelCause.DEADLINE if self.has_rung else CancelCause.CLIENT
