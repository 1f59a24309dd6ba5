"""Figures of engines one after another: sums, and of peaks the greatest."""

from __future__ import annotations

from engine.totals import Totals
from engine.types import Counters, ExpertFigures, StepTimes

CLASSES = len(StepTimes().counts)


def totals(number: int, experts: ExpertFigures | None = None) -> Totals:
    counters = Counters(steps=number, generated_tokens=2 * number, max_held_tokens=number)
    return Totals(counters, StepTimes((number,) * CLASSES, number / 2), experts)


def test_counts_add_up_and_peaks_do_not() -> None:
    both = totals(5).plus(totals(3))
    assert both.counters == Counters(steps=8, generated_tokens=16, max_held_tokens=5)
    assert both.step_times == StepTimes((8,) * CLASSES, 4.0)
    assert Totals().plus(both) == both


def test_experts_of_a_model_that_is_gone_still_count() -> None:
    first, second = ExpertFigures(lookups=4, hits=1, stall_s=0.5), ExpertFigures(lookups=1)
    assert totals(1, first).plus(totals(1)).experts == first
    assert totals(1).plus(totals(1, second)).experts == second
    both = totals(1, first).plus(totals(1, second)).experts
    assert both == ExpertFigures(lookups=5, hits=1, stall_s=0.5)
