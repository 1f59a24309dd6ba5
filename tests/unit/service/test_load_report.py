from __future__ import annotations

import logging

import pytest

from engine.loading import LoadProgress
from service.loader import LoadReport
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("step_s", "told"),
    [
        (0.01, ["weights: 100 %", "compile: 100 %"]),
        (0.1, ["weights: 40 %", "weights: 80 %", "weights: 100 %", "compile: 100 %"]),
    ],
)
def test_a_stage_is_told_at_its_end_and_between_where_it_takes_long(
    caplog: pytest.LogCaptureFixture, step_s: float, told: list[str]
) -> None:
    clock = FakeClock()
    report = LoadReport(clock)
    with caplog.at_level(logging.INFO, "kvarts.service"):
        for done in range(51):
            report(LoadProgress("weights", done, 50))
            clock.advance(step_s)
        for done in range(3):
            report(LoadProgress("compile", done, 2))
    assert [record.message for record in caplog.records] == told
