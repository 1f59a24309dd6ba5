from __future__ import annotations

import pytest

from engine.types import CancelCause
from service.deadline import CallDeadline
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("timeout_s", "left_after_s", "cause"),
    [
        (None, 1e6, CancelCause.CLIENT),
        (100.0, 0.0, CancelCause.CLIENT),
        (100.0, 98.0, CancelCause.CLIENT),
        # 99.1 s may have been written as 100.0 s.
        (100.0, 99.1, CancelCause.DEADLINE),
        (1.0, 0.5, CancelCause.CLIENT),
        (1.0, 0.95, CancelCause.DEADLINE),
        (1.0, 7.0, CancelCause.DEADLINE),
        (0.0, 0.0, CancelCause.DEADLINE),
    ],
)
def test_a_client_that_leaves_when_its_time_is_over_had_a_deadline(
    timeout_s: float | None, left_after_s: float, cause: CancelCause
) -> None:
    clock = FakeClock()
    deadline = CallDeadline(timeout_s, clock)
    clock.advance(left_after_s)
    assert deadline.cause() == cause
