"""Whether a series of samples is flat: check 32 of the reliability bar. Knows no process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Usage:
    """What one process, or all children of it together, hold."""

    rss: int
    """Bytes."""
    files: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """One look at a server under load."""

    at: float
    """Seconds since the first request."""
    service: Usage
    gateway: Usage
    compiles: int
    """Programs compiled so far, those of rebuilds left out."""
    host_cache: int
    """Bytes of prefixes that the service keeps in host memory, as its gauge tells."""
    done: int
    """Requests that ended so far."""
    latency_ms: float
    """Median of the whole completions since the sample before, NaN without one."""


@dataclass(frozen=True)
class Rule:
    """How much the median of the last quarter may lie above that of the second."""

    name: str
    read: Callable[[Sample], float]
    allowed: float
    unit: str = ""


# Of memory the 8 MiB of check 32. Files and threads come and go with the connections of clients,
# which are at most one a worker and kind; what leaks with requests passes that in any long run.
RULES = (
    Rule("RSS of the service", lambda s: s.service.rss / MIB, 8, " MiB"),
    Rule("RSS of the gateway", lambda s: s.gateway.rss / MIB, 8, " MiB"),
    Rule("open files of the service", lambda s: s.service.files, 4),
    Rule("open files of the gateway", lambda s: s.gateway.files, 8),
    Rule("threads of the service", lambda s: s.service.threads, 2),
    Rule("threads of the gateway", lambda s: s.gateway.threads, 2),
    Rule("compiled programs", lambda s: s.compiles, 0),
)


def quarters(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples by the quarter of the time in which each was taken."""
    start, end = samples[0].at, samples[-1].at
    parts: list[list[Sample]] = [[], [], [], []]
    for sample in samples:
        parts[min(int(4 * (sample.at - start) / (end - start)), 3)].append(sample)
    return parts


def faults(samples: Sequence[Sample]) -> list[str]:
    """Returns a sentence for each figure that is not flat.

    Raises:
        ValueError: a quarter is without a sample, so nothing can be said.
    """
    if len(samples) < MIN_SAMPLES or samples[-1].at <= samples[0].at:
        raise ValueError(f"{len(samples)} samples are too few to judge, {MIN_SAMPLES} are needed")
    _, second, _, last = quarters(samples)
    if not second or not last:
        raise ValueError("no sample in the second or the last quarter")
    found: list[str] = []
    for rule in RULES:
        before = statistics.median(map(rule.read, second))
        after = statistics.median(map(rule.read, last))
        if after > before + rule.allowed:
            found.append(
                f"{rule.name}: {after:.1f}{rule.unit} in the last quarter, {before:.1f}{rule.unit}"
                f" in the second: more than {rule.allowed:g}{rule.unit} above,"
                f" {hourly(samples, rule.read):+.1f}{rule.unit} an hour"
            )
    if last[-1].done <= second[-1].done:
        found.append(f"no request ended after the second quarter: {last[-1].done} in all")
    return found


def hourly(samples: Sequence[Sample], read: Callable[[Sample], float]) -> float:
    """The growth in an hour after the first quarter: Theil's slope, the median of all pairs."""
    late = [sample for part in quarters(samples)[1:] for sample in part]
    slopes = [
        (read(b) - read(a)) / (b.at - a.at) for i, a in enumerate(late) for b in late[i + 1 :]
    ]
    return 3600 * statistics.median(slopes)


def table(samples: Sequence[Sample]) -> str:
    """All samples, a row each, and the medians of the quarters below."""
    head = (
        "   at s  service MiB files thr  gateway MiB files thr  cached MiB  compiles   done"
        "  median ms"
    )
    rows = [_row(f"{s.at:7.0f}", [s]) for s in samples]
    parts = [_row(f"     Q{i}", part) for i, part in enumerate(quarters(samples), 1) if part]
    rates = ", ".join(
        f"{rule.name} {hourly(samples, rule.read):+.1f}{rule.unit}" for rule in RULES[:2]
    )
    return "\n".join([head, *rows, *parts, f"an hour, after the first quarter: {rates}"])


def _row(label: str, samples: Sequence[Sample]) -> str:
    def middle(read: Callable[[Sample], float]) -> float:
        return statistics.median(map(read, samples))

    latencies = [s.latency_ms for s in samples if s.latency_ms == s.latency_ms]
    latency = f"{statistics.median(latencies):9.1f}" if latencies else "        -"
    return (
        f"{label}  {middle(lambda s: s.service.rss / MIB):11.1f}"
        f" {middle(lambda s: s.service.files):5.0f} {middle(lambda s: s.service.threads):3.0f}"
        f"  {middle(lambda s: s.gateway.rss / MIB):11.1f}"
        f" {middle(lambda s: s.gateway.files):5.0f} {middle(lambda s: s.gateway.threads):3.0f}"
        f"  {middle(lambda s: s.host_cache / MIB):10.1f}"
        f"  {middle(lambda s: s.compiles):8.0f} {samples[-1].done:6d}  {latency}"
    )
