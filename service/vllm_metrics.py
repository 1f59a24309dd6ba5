"""What a router reads of a vLLM server, under vLLM's names (`--vllm-metrics`).

Routers that find no label of another server on a pod read these names; the meaning of each is that
of the Gateway API's model server protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.types import PoolInfo, PoolKind, Snapshot


class VllmCollector(Collector):
    """The five figures that routers weigh replicas by. `max_adapters` is the room for adapters."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        model_name: Callable[[], str],
        max_adapters: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._snapshot = snapshot
        self._model_name = model_name
        self._max_adapters = max_adapters
        self._wall_clock = wall_clock

    def collect(self) -> Iterable[Metric]:
        """Returns the families of one scrape, all from one snapshot; none while nothing is served."""
        snapshot, name = self._snapshot(), self._model_name()
        if snapshot is None:
            return
        yield _of_model("num_requests_running", "Requests in a slot.", name, snapshot.running)
        yield _of_model("num_requests_waiting", "Requests that wait.", name, snapshot.queued)
        pages = next((pool for pool in snapshot.pools if pool.kind is PoolKind.KV), None)
        if pages is not None and pages.size:
            share = pages.used / pages.size
            yield _of_model("kv_cache_usage_perc", "Pages in use, 0 to 1.", name, share)
            yield _cache_config(pages)
        yield self._adapters(snapshot)

    def _adapters(self, snapshot: Snapshot) -> GaugeMetricFamily:
        """Nothing ever waits for an adapter: all that are loaded can run in one step."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Time of day, with the adapters of running requests.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running = [one.name for one in snapshot.adapters if one.active_requests]
        family.add_metric([str(self._max_adapters), ",".join(running), ""], self._wall_clock())
        return family


def _of_model(name: str, doc: str, model: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"vllm:{name}", doc, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _cache_config(pages: PoolInfo) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "vllm:cache_config_info", "Constant 1.", labels=["block_size", "num_gpu_blocks"]
    )
    family.add_metric([str(pages.unit_tokens), str(pages.size)], 1)
    return family
