from __future__ import annotations

import pytest

from engine.requests import Request
from engine.scheduling.shift import Shift, plan_shift


# Contract 5.3: K = min(n_ctx - 4, n_keep + BOS), D = n_discard or half of the rest, below the rest.
@pytest.mark.parametrize(
    ("n_keep", "n_discard", "adds_bos", "shift"),
    [
        (0, 0, True, Shift(1, 127)),
        (0, 0, False, Shift(0, 127)),
        (3, 20, True, Shift(4, 20)),
        (-1, 0, True, Shift(11, 122)),
        (-1, 0, False, Shift(10, 122)),
        (1000, 0, True, Shift(252, 1)),
        (0, 10_000, True, Shift(1, 253)),
        (250, 0, True, Shift(251, 2)),
    ],
)
def test_a_shift_is_the_peers(n_keep: int, n_discard: int, adds_bos: bool, shift: Shift) -> None:
    request = Request("r", (7,) * 10, n_keep=n_keep, n_discard=n_discard)
    assert plan_shift(request, held=255, context_tokens=256, adds_bos=adds_bos) == shift
