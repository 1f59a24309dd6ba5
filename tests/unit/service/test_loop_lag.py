from __future__ import annotations

import pytest

from service.loop_lag import watch_loop_lag
from tests.fakes import FakeClock


class Enough(Exception):
    """Ends what never ends by itself."""


async def test_the_lag_is_what_a_sleep_took_too_long() -> None:
    clock, late_s, seen = FakeClock(), [0.0, 0.5, -0.25], list[float]()

    async def sleep(seconds: float) -> None:
        if not late_s:
            raise Enough
        clock.advance(seconds + late_s.pop(0))

    with pytest.raises(Enough):
        await watch_loop_lag(seen.append, interval_s=1.0, clock=clock, sleep=sleep)
    assert seen == [0.0, 0.5, 0.0]
