"""The metrics: what they count, against what clients saw; and who counts as served."""

from __future__ import annotations

import asyncio
import logging
import re
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvarts.v1 import model_pb2, rebuild_pb2, slot_pb2

from engine.errors import EngineFault
from service.metrics import Metrics
from tests.contract.serving import (
    CONFIG,
    GenerateRequest,
    Serving,
    StepGate,
    failure,
    gated_runner,
    serving,
)

GENERATE = "GenerationService/Generate"
LONG = GenerateRequest(text="a long one", ignore_eos=True, max_tokens=200)


class Ended(logging.Handler):
    """The log lines of calls that have ended, as they come."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put_nowait(getattr(record, "fields", {}))

    async def take(self, count: int) -> list[dict[str, Any]]:
        """Waits until so many more calls have ended."""
        async with asyncio.timeout(60):
            return [await self._lines.get() for _ in range(count)]


@asynccontextmanager
async def measured(**changes: Any) -> AsyncGenerator[tuple[Serving, Ended]]:
    """A server with metrics, and the ends of its calls."""
    ended = Ended()
    log = logging.getLogger("kvarts.requests")
    level = log.level
    log.addHandler(ended)
    log.setLevel(logging.INFO)
    try:
        async with serving(metrics_port=0, **changes) as it:
            yield it, ended
    finally:
        log.removeHandler(ended)
        log.setLevel(level)


async def text_of(it: Serving) -> str:
    def read() -> str:
        url = f"http://127.0.0.1:{it.server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.read().decode()

    return await asyncio.to_thread(read)


async def scrape(it: Serving) -> dict[str, float]:
    """Every sample but those that move by themselves."""
    lines = (await text_of(it)).splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    moving = ("process_", "kvarts_loop_lag_")
    return {name: float(value) for name, value in pairs if not name.startswith(moving)}


def codes(metrics: dict[str, float], rpc: str = GENERATE) -> dict[str, float]:
    """How often each status was counted for an RPC."""
    prefix, suffix = 'kvarts_requests_total{code="', f'",rpc="{rpc}"}}'
    return {
        name.removeprefix(prefix).removesuffix(suffix): value
        for name, value in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }


async def ends_late(it: Serving) -> None:
    failed = await failure(it.collect(LONG, timeout=1))
    assert failed.code == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_counters_are_exactly_what_clients_saw() -> None:
    gate = StepGate()
    config = replace(CONFIG, queue_requests=64)
    async with measured(config=config, runner=gated_runner(gate)) as (it, ended):
        left = [it.generation.Generate(LONG) for _ in range(10)]
        for _ in left:
            await it.commanded("submit")
        for call in left:
            call.cancel()
        for _ in left:
            await it.commanded("cancel")
        await asyncio.gather(*(ends_late(it) for _ in range(5)))
        for _ in range(5):
            await it.commanded("cancel")
        for _ in range(5):
            assert (await failure(it.collect(with_slot(99)))).reason == "NO_SUCH_SLOT"
        gate.open()
        request = GenerateRequest(text="abc", max_tokens=3, ignore_eos=True)
        good = await asyncio.gather(*(it.collect(request) for _ in range(50)))
        await ended.take(70)
        first, second = await scrape(it), await scrape(it)
    assert codes(first) == {"OK": 50, "CANCELLED": 10, "DEADLINE_EXCEEDED": 5, "NOT_FOUND": 5}
    assert first['kvarts_cancelled_total{cause="client"}'] == 10
    assert first['kvarts_cancelled_total{cause="deadline"}'] == 5
    outcomes = {
        outcome: first[f'kvarts_generations_total{{outcome="{outcome}"}}']
        for outcome in ("finished", "cancelled", "refused", "failed")
    }
    assert outcomes == {"finished": 50, "cancelled": 15, "refused": 5, "failed": 0}
    finished = [answer[-1].finished for answer in good]
    # What was cancelled had read one prompt at most, in the step that the gate held up.
    read = sum(f.prompt_tokens - f.cached_tokens for f in finished)
    evaluated = first['kvarts_prompt_tokens_total{source="evaluated"}']
    assert evaluated - read in (0, len("a long one") + 1)
    assert first['kvarts_prompt_tokens_total{source="cached"}'] == sum(
        f.cached_tokens for f in finished
    )
    assert first["kvarts_time_to_first_token_seconds_count"] == 50
    assert first["kvarts_queue_seconds_count"] == 50
    assert first["kvarts_inter_token_seconds_count"] == 100
    assert first["kvarts_step_seconds_count"] == first["kvarts_steps_total"] > 0
    for gauge in ("requests_running", "requests_queued", "adapters_loaded"):
        assert first[f"kvarts_{gauge}"] == 0
    assert first['kvarts_pool_units{pool="kv",state="used"}'] == 0
    assert first == second


def with_slot(slot_id: int) -> GenerateRequest:
    request = GenerateRequest(slot_id=slot_id)
    request.MergeFrom(LONG)
    return request


async def test_a_client_that_leaves_with_its_answer_was_served() -> None:
    async def one(it: Serving) -> None:
        call = it.generation.Generate(GenerateRequest(text="abc", max_tokens=1))
        while not (await call.read()).HasField("finished"):
            pass
        call.cancel()

    async with measured() as (it, ended):
        for _ in range(5):
            await asyncio.gather(*(one(it) for _ in range(4)))
        lines = await ended.take(20)
        metrics = await scrape(it)
    assert {line["code"] for line in lines} == {"OK"}
    assert codes(metrics) == {"OK": 20}
    assert metrics['kvarts_cancelled_total{cause="client"}'] == 0


async def test_operations_on_slots_are_counted_by_result() -> None:
    gate = StepGate()
    async with measured(runner=gated_runner(gate)) as (it, _):
        before = await scrape(it)
        busy = asyncio.create_task(it.collect(with_slot(1)))
        await gate.arrival()
        erase = slot_pb2.EraseSlotRequest(slot_id=1, fail_if_busy=True)
        refused = asyncio.create_task(failure(it.slots.EraseSlot(erase)))
        await it.commanded("erase_slot")
        gate.open()
        assert (await refused).reason == "SLOT_BUSY"
        await busy
        await it.slots.EraseSlot(erase)
        await failure(it.slots.EraseSlot(slot_pb2.EraseSlotRequest()))
        after = await scrape(it)
    results = 'kvarts_slot_ops_total{op="erase",result="%s"}'
    assert before[results % "ok"] == 0
    assert [after[results % r] for r in ("ok", "SLOT_BUSY", "INVALID_FIELD")] == [1, 1, 1]
    assert after['kvarts_slot_op_seconds_count{op="erase"}'] == 3


def test_an_operation_that_nobody_waits_for_is_cancelled_and_a_fault_keeps_its_name() -> None:
    metrics = Metrics()
    with pytest.raises(asyncio.CancelledError), metrics.slot_op("erase"):
        raise asyncio.CancelledError
    with pytest.raises(EngineFault), metrics.slot_op("erase"):
        raise EngineFault("id")
    for result in ("cancelled", "ENGINE_FAULT"):
        labels = {"op": "erase", "result": result}
        assert metrics.registry.get_sample_value("kvarts_slot_ops_total", labels) == 1


async def test_the_lag_of_the_event_loop_is_measured() -> None:
    async with measured() as (it, _):
        async with asyncio.timeout(30):
            while True:
                lines = (await text_of(it)).splitlines()
                counts = [line for line in lines if line.startswith("kvarts_loop_lag_seconds_co")]
                if float(counts[0].rsplit(" ", 1)[1]) > 0:
                    break


async def test_rebuilds_are_counted_by_result_and_a_question_is_none() -> None:
    def resize(pages: int, **fields: Any) -> rebuild_pb2.RebuildRequest:
        target = rebuild_pb2.PoolSizes(kv_pages=pages)
        return rebuild_pb2.RebuildRequest(target=target, **fields)

    async with measured() as (it, _):
        before = await scrape(it)
        await it.rebuild.Rebuild(resize(9, validate_only=True))
        asked = await scrape(it)
        await failure(it.rebuild.Rebuild(resize(1)))
        after = await scrape(it)
    results = 'kvarts_rebuilds_total{result="%s"}'
    count = "kvarts_rebuild_seconds_count"
    assert (before[results % "ok"], before[count], asked[count]) == (0, 0, 0)
    assert after[results % "BELOW_FLOOR"] == 1
    assert after[count] == 1


async def test_a_call_tells_the_same_metrics_as_the_port() -> None:
    async with measured() as (it, ended):
        await it.collect(LONG)
        await ended.take(1)
        told = (await it.model.GetMetrics(model_pb2.GetMetricsRequest())).text
        await ended.take(1)
        scraped = await text_of(it)
    assert names(told) == names(scraped)
    line = 'kvarts_requests_total{code="OK",rpc="GenerationService/Generate"} 1.0'
    assert line in told.splitlines()


def names(text: str) -> set[str]:
    """The families of a scrape; the call itself adds only samples."""
    return {line for line in text.splitlines() if line.startswith("# TYPE")}


async def test_readiness_is_a_gauge() -> None:
    async with measured() as (it, _):
        assert (await scrape(it))["kvarts_ready"] == 1


async def test_the_slot_folder_has_its_gauges(tmp_path: Path) -> None:
    (tmp_path / "a.slot").write_bytes(b"x" * 1000)
    (tmp_path / ".tenant-ab").mkdir()
    (tmp_path / ".tenant-ab" / "b.slot").write_bytes(b"x" * 500)
    (tmp_path / "elsewhere").symlink_to("/dev/zero")
    async with measured(slot_save_path=str(tmp_path)) as (it, _):
        metrics = await scrape(it)
    assert metrics["kvarts_slot_disk_bytes"] == 1500
    free, size = metrics["kvarts_slot_disk_free_bytes"], metrics["kvarts_slot_disk_size_bytes"]
    assert 0 < free <= size


async def test_routers_find_the_names_of_vllm_where_asked_for() -> None:
    async with measured() as (it, _):
        assert "vllm:" not in await text_of(it)
    async with measured(has_vllm_metrics=True) as (it, _):
        text = await text_of(it)
    assert 'vllm:num_requests_waiting{model_name="fake"} 0.0' in text
    assert re.search(r'vllm:cache_config_info{block_size="16",num_gpu_blocks="\d+"} 1.0', text)


_OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"

# Source: the names and types that the operator's dashboards and alerts are built on.
TYPES = {
    "requests_total": "counter",
    "prompt_tokens_total": "counter",
    "generated_tokens_total": "counter",
    "cancelled_total": "counter",
    "prefix_query_tokens_total": "counter",
    "prefix_hit_tokens_total": "counter",
    "slot_ops_total": "counter",
    "compiles_total": "counter",
    "rebuilds_total": "counter",
    "ready": "gauge",
    "slots": "gauge",
    "config_reloads_total": "counter",
    "requests_running": "gauge",
    "requests_queued": "gauge",
    "pool_units": "gauge",
    "pool_bytes": "gauge",
    "host_cache_bytes": "gauge",
    "adapters_loaded": "gauge",
    "adapter_bytes": "gauge",
    "adapter_rank": "gauge",
    "adapter_targets": "gauge",
    "adapter_requests_running": "gauge",
    "build_info": "gauge",
    "queue_seconds": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_seconds": "histogram",
    "request_seconds": "histogram",
    "step_seconds": "histogram",
    "slot_op_seconds": "histogram",
    "rebuild_seconds": "histogram",
    "model_swaps_total": "counter",
    "model_swap_seconds": "histogram",
    "loop_lag_seconds": "histogram",
}


async def test_every_metric_has_its_name_and_its_type() -> None:
    async with measured() as (it, _):
        lines = (await text_of(it)).splitlines()
    words = [line.split(" ") for line in lines if line.startswith("# TYPE kvarts_")]
    types = {name.removeprefix("kvarts_"): kind for _, _, name, kind in words}
    assert TYPES.items() <= types.items()
    documented = _OPERATIONS.read_text()
    own = [name for name in types if not name.endswith("_created")]  # the library's companions
    assert [name for name in own if f"`{name}`" not in documented] == []
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


async def test_a_histogram_of_steps_adds_up() -> None:
    async with measured() as (it, _):
        await it.collect(LONG)
        metrics = await scrape(it)
    buckets = [v for k, v in metrics.items() if k.startswith("kvarts_step_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == metrics["kvarts_step_seconds_count"] == 200
