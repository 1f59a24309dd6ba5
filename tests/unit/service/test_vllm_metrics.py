"""The names that routers read, against the Gateway API's model server protocol."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from engine.types import AdapterInfo, Counters, PoolInfo, PoolKind, Snapshot
from service.vllm_metrics import VllmCollector

PAGES = PoolInfo(
    kind=PoolKind.KV,
    size=200,
    free=100,
    used=50,
    pinned=25,
    cached=25,
    floor=2,
    ceiling=400,
    unit_bytes=1024,
    unit_tokens=32,
)
ADAPTER = AdapterInfo(
    adapter_id=0,
    name="idle",
    path="idle.gguf",
    rank=8,
    alpha=None,
    scale=1.0,
    size_bytes=100,
    active_requests=0,
    task_name="",
    prompt_prefix="",
    invocation_tokens=(),
    targets=(),
    digest=b"",
)
SNAPSHOT = Snapshot(
    slots=(),
    pools=(replace(PAGES, kind=PoolKind.SWA, unit_tokens=1), PAGES),
    running=3,
    queued=7,
    queue_limit=256,
    counters=Counters(),
    adapters=(
        ADAPTER,
        replace(ADAPTER, adapter_id=1, name="one", active_requests=2),
        replace(ADAPTER, adapter_id=2, name="two", active_requests=1),
    ),
)


def test_the_figures_of_a_router() -> None:
    registry = CollectorRegistry()
    registry.register(VllmCollector(lambda: SNAPSHOT, lambda: "m", 4, wall_clock=lambda: 12.5))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", labels)

    assert value("num_requests_running", model_name="m") == 3
    assert value("num_requests_waiting", model_name="m") == 7
    assert value("kv_cache_usage_perc", model_name="m") == 0.25
    assert value("cache_config_info", block_size="32", num_gpu_blocks="200") == 1
    # The newest sample wins, so its value is the time.
    labels = {"max_lora": "4", "running_lora_adapters": "one,two", "waiting_lora_adapters": ""}
    assert value("lora_requests_info", **labels) == 12.5


def test_a_model_without_pages_has_no_share_of_them() -> None:
    registry = CollectorRegistry()
    empty = replace(SNAPSHOT, pools=())
    registry.register(VllmCollector(lambda: empty, lambda: "m", 0))
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "m"}) is None
