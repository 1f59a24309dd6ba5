"""Prometheus metrics: what calls cost, and what the engine's last snapshot says.

Engine figures are read from the snapshot at the moment of a scrape, so that every figure that a
client can see comes from the same counters and a second scraper changes nothing. Labels are
closed sets; no label ever holds anything that a caller wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from types import TracebackType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.errors import EngineError
from engine.types import (
    STEP_BOUNDS_S,
    AdapterInfo,
    CancelCause,
    Counters,
    ExpertFigures,
    PoolInfo,
    Snapshot,
    StepTimes,
)

# What slots can be asked to do in this build.
_SLOT_OPS = ("erase",)
_SHORT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The registry of one server. Every duration is in seconds on a monotonic clock."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        info = Gauge("kvarts_build_info", "Constant 1.", ["version"], registry=self.registry)
        info.labels(server_version()).set(1)
        self._requests = Counter(
            "kvarts_requests", "Calls ended.", ["rpc", "code"], registry=self.registry
        )
        self._cancelled = Counter(
            "kvarts_cancelled", "Generations cancelled.", ["cause"], registry=self.registry
        )
        for cause in CancelCause:
            self._cancelled.labels(cause.value)
        self._durations = self._histogram("request", "One call, whole.", _LONG_BUCKETS, ["rpc"])
        self._queue = self._histogram("queue", "Submission to admission.", _LONG_BUCKETS)
        self._first_token = self._histogram(
            "time_to_first_token", "Call to its first token.", _LONG_BUCKETS
        )
        self._inter_token = self._histogram("inter_token", "Token to token.", _SHORT_BUCKETS)
        self._loop_lag = self._histogram("loop_lag", "Lateness of the event loop.", _SHORT_BUCKETS)
        self._slot_times = self._histogram(
            "slot_op", "One operation on a slot, whole.", _LONG_BUCKETS, ["op"]
        )
        self._slot_ops = Counter(
            "kvarts_slot_ops",
            "Operations on slots by result: ok, cancelled, or the error's reason.",
            ["op", "result"],
            registry=self.registry,
        )
        for op in _SLOT_OPS:
            self._slot_ops.labels(op, "ok")

    def observe_rpc(self, rpc: str, code: str, duration_s: float) -> None:
        """Counts one call that ended with the status named `code`."""
        self._requests.labels(rpc, code).inc()
        self._durations.labels(rpc).observe(duration_s)

    def observe_queue(self, queue_s: float) -> None:
        """Counts the wait of one generation for its slot."""
        self._queue.observe(queue_s)

    def observe_first_token(self, ttft_s: float) -> None:
        """Counts the wait of one call for its first token."""
        self._first_token.observe(ttft_s)

    def observe_inter_token(self, gap_s: float) -> None:
        """Counts the time between two tokens of one generation."""
        self._inter_token.observe(gap_s)

    def observe_loop_lag(self, lag_s: float) -> None:
        """Counts by how much the event loop woke up too late."""
        self._loop_lag.observe(lag_s)

    @contextmanager
    def slot_op(self, op: str) -> Generator[None]:
        """Times and counts what is done inside, an operation on a slot."""
        began_s = time.monotonic()
        result = "cancelled"
        try:
            yield
            result = "ok"
        except EngineError as error:
            result = error.reason
            raise
        finally:
            self._slot_ops.labels(op, result).inc()
            self._slot_times.labels(op).observe(time.monotonic() - began_s)

    def count_cancelled(self, cause: CancelCause) -> None:
        """Counts one generation that the engine ended early."""
        self._cancelled.labels(cause.value).inc()

    def watch(self, snapshot: Callable[[], Snapshot]) -> None:
        """Adds the engine's figures, read from `snapshot()` at each scrape."""
        self.registry.register(EngineCollector(snapshot))

    def _histogram(
        self, name: str, doc: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(
            f"kvarts_{name}_seconds", doc, list(labels), buckets=buckets, registry=self.registry
        )


class EngineCollector(Collector):
    """The engine's counters and gauges as metric families."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Returns the families of one scrape, all from one snapshot."""
        snapshot = self._snapshot()
        yield from _counter_families(snapshot.counters)
        yield _gauge("requests_running", "Generations in a slot.", snapshot.running)
        yield _gauge("requests_queued", "Generations that wait.", snapshot.queued)
        yield from _adapter_families(snapshot.adapters)
        yield _step_family(snapshot.step_times)
        yield from _pool_families(snapshot.pools)
        if snapshot.experts is not None:
            yield from _expert_families(snapshot.experts)


def _adapter_families(adapters: Sequence[AdapterInfo]) -> Iterable[Metric]:
    """By id: names may say what nobody but an administrator should read."""
    yield _gauge("adapters_loaded", "Adapters loaded.", len(adapters))
    families = (
        ("adapter_bytes", "Memory that an adapter takes.", "size_bytes"),
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


class MetricsServer:
    """The Prometheus text over HTTP, on a thread of its own; a context manager that closes it."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, metrics.registry)

    @property
    def port(self) -> int:
        """The bound TCP port."""
        return self._server.server_port

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def server_version() -> str:
    """Returns the installed version, "0" when run from a tree that was never installed."""
    try:
        return version("kvarts")
    except PackageNotFoundError:
        return "0"


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
