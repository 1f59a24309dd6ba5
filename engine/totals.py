"""What engines that came one after another in a process did together: counters never fall."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from engine.types import Counters, ExpertFigures, Snapshot, StepTimes

# Of a peak the greatest counts, everything else is a sum.
_PEAKS = frozenset({"max_held_tokens"})


@dataclass(frozen=True)
class Totals:
    """The figures of a snapshot that count up; `experts` None: no model had experts in slots."""

    counters: Counters = field(default_factory=Counters)
    step_times: StepTimes = field(default_factory=StepTimes)
    experts: ExpertFigures | None = None

    @classmethod
    def of(cls, snapshot: Snapshot) -> Totals:
        """Returns those of one engine."""
        return cls(snapshot.counters, snapshot.step_times, snapshot.experts)

    def plus(self, other: Totals) -> Totals:
        """Returns both together."""
        return Totals(
            _counters(self.counters, other.counters),
            _step_times(self.step_times, other.step_times),
            _experts(self.experts, other.experts),
        )

    def over(self, snapshot: Snapshot) -> Snapshot:
        """Returns a snapshot with these figures in the place of its own."""
        return replace(
            snapshot,
            counters=self.counters,
            step_times=self.step_times,
            experts=self.experts,
        )


def _counters(one: Counters, two: Counters) -> Counters:
    names = [each.name for each in fields(Counters)]
    pairs = {name: (getattr(one, name), getattr(two, name)) for name in names}
    return Counters(
        **{name: max(pair) if name in _PEAKS else sum(pair) for name, pair in pairs.items()}
    )


def _step_times(one: StepTimes, two: StepTimes) -> StepTimes:
    counts = tuple(a + b for a, b in zip(one.counts, two.counts, strict=True))
    return StepTimes(counts, one.total_s + two.total_s)


def _experts(one: ExpertFigures | None, two: ExpertFigures | None) -> ExpertFigures | None:
    """Whether prompts read ahead is of the later model that has experts."""
    if one is None or two is None:
        return two or one
    return ExpertFigures(
        lookups=one.lookups + two.lookups,
        hits=one.hits + two.hits,
        loads=one.loads + two.loads,
        loads_ahead=one.loads_ahead + two.loads_ahead,
        stall_s=one.stall_s + two.stall_s,
        overlaps=two.overlaps,
    )
