"""Prometheus metrics: what calls cost, and what the engine's last snapshot says.

Engine figures are read from the snapshot at the moment of a scrape, so that every figure that a
client can see comes from the same counters and a second scraper changes nothing. Labels are
closed sets; no label ever holds anything that a caller wrote.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    start_http_server,
)
from prometheus_client.registry import Collector

from engine.errors import EngineError
from engine.types import CancelCause, Snapshot
from service.engine_metrics import EngineCollector

_SLOT_OPS = ("save", "restore", "erase", "delete")
# What somebody is woken for.
_SLOT_FAULTS = ("DISK_FULL", "SLOT_IO", "SLOT_FILE_CORRUPT")
_REBUILD_FAULTS = ("REBUILD_ROLLED_BACK", "REBUILD_FAILED")
_SWAP_FAULTS = ("MODEL_ROLLED_BACK", "MODEL_LOST")
_RESULTS = "ok, cancelled, or the error's reason"
# Upper bounds in seconds. Of waits: 2 s is where people stop waiting for a first token, 600 s where
# a long answer ends. Of gaps: 5 ms is a small model alone, 100 ms the speed of reading.
_WAIT_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0),
    *(5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
_GAP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03),
    *(0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)


class Metrics:
    """The registry of one server. Every duration is in seconds on a monotonic clock."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        info = Gauge("kvarts_build_info", "Constant 1.", ["version"], registry=self.registry)
        info.labels(server_version()).set(1)
        self._ready = Gauge("kvarts_ready", "1 while it can generate.", registry=self.registry)
        self._requests = self._counter("requests", "Calls ended.", "rpc", "code")
        self._durations = self._histogram("request", "One call, whole.", _WAIT_BOUNDS_S, "rpc")
        self._cancelled = self._counter("cancelled", "Generations cancelled.", "cause")
        self._queue = self._histogram("queue", "Submission to admission.", _WAIT_BOUNDS_S)
        self._first_token = self._histogram(
            "time_to_first_token", "Call to its first token.", _WAIT_BOUNDS_S
        )
        self._inter_token = self._histogram("inter_token", "Token to token.", _GAP_BOUNDS_S)
        self._loop_lag = self._histogram("loop_lag", "Lateness of the event loop.", _GAP_BOUNDS_S)
        self._slot_ops = self._counter(
            "slot_ops", f"Operations on slots by result: {_RESULTS}.", "op", "result"
        )
        self._slot_times = self._histogram(
            "slot_op", "One operation on a slot, whole.", _WAIT_BOUNDS_S, "op"
        )
        self._rebuilds = self._counter("rebuilds", f"Rebuilds by result: {_RESULTS}.", "result")
        self._rebuild_times = self._histogram("rebuild", "One rebuild, whole.", _WAIT_BOUNDS_S)
        self._swaps = self._counter(
            "model_swaps", f"Changes of model by result: {_RESULTS}.", "result"
        )
        self._swap_times = self._histogram("model_swap", "One change of model.", _WAIT_BOUNDS_S)
        self._reloads = self._counter("config_reloads", "Files read again.", "what", "result")
        # What has not happened yet is 0, not absent: a rate needs a value before.
        for cause in CancelCause:
            self._cancelled.labels(cause.value)
        for op in _SLOT_OPS:
            for result in ("ok", *_SLOT_FAULTS):
                self._slot_ops.labels(op, result)
        for result in ("ok", *_REBUILD_FAULTS):
            self._rebuilds.labels(result)
        for result in ("ok", *_SWAP_FAULTS):
            self._swaps.labels(result)
        for what in ("certificates", "api_keys"):
            for result in ("ok", "refused"):
                self._reloads.labels(what, result)

    def watch_calls(self, num_open: Callable[[], int]) -> None:
        """Shows at each scrape how many calls are being served."""
        gauge = Gauge("kvarts_open_calls", "Calls being served.", registry=self.registry)
        gauge.set_function(num_open)

    def set_ready(self, is_ready: bool) -> None:
        """Shows whether the server can generate now."""
        self._ready.set(is_ready)

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

    def slot_op(self, op: str) -> AbstractContextManager[None]:
        """Times and counts what is done inside, an operation on a slot."""
        return _measured(partial(self._slot_ops.labels, op), self._slot_times.labels(op))

    def rebuild(self) -> AbstractContextManager[None]:
        """Times and counts what is done inside, a rebuild of pools."""
        return _measured(self._rebuilds.labels, self._rebuild_times)

    def model_swap(self) -> AbstractContextManager[None]:
        """Times and counts what is done inside, a change of the model."""
        return _measured(self._swaps.labels, self._swap_times)

    def count_reload(self, what: str, result: str) -> None:
        """Counts one try to put changed files in force."""
        self._reloads.labels(what, result).inc()

    def count_cancelled(self, cause: CancelCause) -> None:
        """Counts one generation that the engine ended early."""
        self._cancelled.labels(cause.value).inc()

    def watch(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """Adds the engine's figures, read from `snapshot()` at each scrape; None has none."""
        self.add(EngineCollector(snapshot))

    def add(self, collector: Collector) -> None:
        """Adds what a collector reads at each scrape."""
        self.registry.register(collector)

    def text(self) -> str:
        """Returns one scrape in Prometheus' text format 0.0.4; reads files, so it may block."""
        return generate_latest(self.registry).decode()

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"kvarts_{name}", doc, labels, registry=self.registry)

    def _histogram(self, name: str, doc: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(
            f"kvarts_{name}_seconds", doc, labels, buckets=bounds, registry=self.registry
        )


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


@contextmanager
def _measured(count: Callable[[str], Counter], times: Histogram) -> Generator[None]:
    """Counts what is done inside by its result, and how long it took."""
    began_s = time.monotonic()
    result = "cancelled"
    try:
        yield
        result = "ok"
    except EngineError as error:
        result = error.reason
        raise
    finally:
        count(result).inc()
        times.observe(time.monotonic() - began_s)
