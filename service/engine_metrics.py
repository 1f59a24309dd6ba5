"""The engine's counters and gauges as Prometheus families, read from its snapshot at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.types import (
    STEP_BOUNDS_S,
    AdapterInfo,
    Counters,
    ExpertFigures,
    PoolInfo,
    Snapshot,
    StepTimes,
)


class EngineCollector(Collector):
    """The engine's counters and gauges as metric families."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Returns the families of one scrape, all from one snapshot; none while nothing is served."""
        snapshot = self._snapshot()
        if snapshot is None:
            return
        yield from _counter_families(snapshot.counters)
        yield _gauge("requests_running", "Generations in a slot.", snapshot.running)
        yield _gauge("slots", "Generations that can run at once.", len(snapshot.slots))
        yield _gauge("requests_queued", "Generations that wait.", snapshot.queued)
        yield from _adapter_families(snapshot.adapters)
        yield _step_family(snapshot.step_times)
        yield from _pool_families(snapshot.pools)
        yield _gauge(
            "host_cache_bytes",
            "Host memory of prefixes that lost their place in the pools.",
            snapshot.host_cache_bytes,
        )
        if snapshot.experts is not None:
            yield from _expert_families(snapshot.experts)


def _adapter_families(adapters: Sequence[AdapterInfo]) -> Iterable[Metric]:
    """By id: names may say what nobody but an administrator should read."""
    yield _gauge("adapters_loaded", "Adapters loaded.", len(adapters))
    families = (
        ("adapter_bytes", "Bytes of an adapter's values.", "size_bytes"),
        ("adapter_rank", "Greatest rank of an adapter.", "rank"),
        ("adapter_targets", "Weights that an adapter changes.", "targets"),
        ("adapter_requests_running", "Requests that run with an adapter.", "active_requests"),
    )
    for name, doc, field in families:
        family = GaugeMetricFamily(f"kvarts_{name}", doc, labels=["adapter_id"])
        for adapter in adapters:
            value = getattr(adapter, field)
            family.add_metric(
                [str(adapter.adapter_id)], len(value) if field == "targets" else value
            )
        yield family


def _counter_families(counters: Counters) -> Iterable[Metric]:
    outcomes = _labelled("generations", "Generations by outcome.", "outcome")
    outcomes.add_metric(["finished"], counters.requests_finished)
    outcomes.add_metric(["failed"], counters.requests_failed)
    outcomes.add_metric(["cancelled"], counters.requests_cancelled)
    outcomes.add_metric(["refused"], counters.requests_refused)
    yield outcomes
    prompt = _labelled("prompt_tokens", "Prompt tokens by where they came from.", "source")
    prompt.add_metric(["evaluated"], counters.prompt_tokens_evaluated)
    prompt.add_metric(["cached"], counters.prompt_tokens_cached)
    yield prompt
    queried = counters.prompt_tokens_evaluated + counters.prompt_tokens_cached
    yield _counter("generations_started", "Generations admitted.", counters.requests_started)
    yield _counter("prefix_query_tokens", "Prompt tokens looked up for reuse.", queried)
    yield _counter(
        "prefix_hit_tokens", "Prompt tokens found for reuse.", counters.prompt_tokens_cached
    )
    yield _counter("generated_tokens", "Tokens sampled.", counters.generated_tokens)
    yield _counter("prefill_seconds", "Time in prompt evaluation.", counters.prefill_s)
    yield _counter("decode_seconds", "Time in token generation.", counters.decode_s)
    yield _counter("steps", "Engine steps.", counters.steps)
    yield _counter("busy_slot_steps", "Busy slots summed over steps.", counters.busy_slot_steps)
    yield _counter("preemptions", "Rows put back in the queue.", counters.preemptions)
    yield _counter("evicted_slots", "Idle slots emptied for room.", counters.evicted_slots)
    yield _counter("compiles", "Programs compiled.", counters.compiles)


def _step_family(times: StepTimes) -> HistogramMetricFamily:
    """Prometheus adds each class to those above it."""
    bounds = [*(repr(bound) for bound in STEP_BOUNDS_S), "+Inf"]
    totals = accumulate(times.counts)
    return HistogramMetricFamily(
        "kvarts_step_seconds",
        "Engine steps that ran the model.",
        buckets=list(zip(bounds, totals, strict=True)),
        sum_value=times.total_s,
    )


def _pool_families(pools: Iterable[PoolInfo]) -> Iterable[Metric]:
    units = GaugeMetricFamily(
        "kvarts_pool_units", "Units by what holds them.", labels=["pool", "state"]
    )
    sizes = GaugeMetricFamily("kvarts_pool_bytes", "Bytes of all usable units.", labels=["pool"])
    for pool in pools:
        name = pool.kind.value
        units.add_metric([name, "free"], pool.free)
        units.add_metric([name, "used"], pool.used)
        units.add_metric([name, "pinned"], pool.pinned)
        units.add_metric([name, "cached"], pool.cached)
        sizes.add_metric([name], pool.size * pool.unit_bytes)
    yield units
    yield sizes


def _expert_families(figures: ExpertFigures) -> Iterable[Metric]:
    """Hit rate = hits / lookups."""
    yield _counter("expert_lookups", "Experts that layers of steps needed.", figures.lookups)
    yield _counter("expert_hits", "Of those, the ones in memory.", figures.hits)
    loads = _labelled("expert_loads", "Experts read, waited for or ahead.", "when")
    loads.add_metric(["waited"], figures.loads)
    loads.add_metric(["ahead"], figures.loads_ahead)
    yield loads
    yield _counter("expert_stall_seconds", "Time that steps waited for experts.", figures.stall_s)


def _gauge(name: str, doc: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvarts_{name}", doc, value=value)


def _counter(name: str, doc: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvarts_{name}", doc, value=value)


def _labelled(name: str, doc: str, label: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvarts_{name}", doc, labels=[label])
