"""RebuildService over the wire: refusals with their numbers, plans, and what a rebuild tells."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2
from kvarts.v1 import generation_pb2, rebuild_pb2

from service.server import READY_SERVICE
from tests.contract.serving import CONFIG, failure, serving
from tests.fake_runner import FakeRunner
from tests.fakes import fake_shape

Code = grpc.StatusCode
PoolSizes, RebuildRequest = rebuild_pb2.PoolSizes, rebuild_pb2.RebuildRequest
GenerateRequest = generation_pb2.GenerateRequest
PAGE_BYTES = 16 * fake_shape().token_bytes("f16")
HUGE = 1 << 40


def ask(**sizes: int) -> rebuild_pb2.RebuildRequest:
    return RebuildRequest(target=PoolSizes(**sizes))


async def test_refusals_have_their_numbers_and_change_nothing() -> None:
    async with serving() as it:
        before = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
        missing = await failure(it.rebuild.Rebuild(ask(swa_pages=1, mamba_slots=1, kv_pages=HUGE)))
        below = await failure(it.rebuild.Rebuild(ask(kv_pages=1)))
        large = await failure(it.rebuild.Rebuild(ask(kv_pages=HUGE)))
        assert await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest()) == before
    assert (missing.code, missing.reason) == (Code.NOT_FOUND, "NO_SUCH_POOL")
    assert missing.metadata == {"pool": "swa,mamba", "architecture": ""}
    assert (below.code, below.reason) == (Code.OUT_OF_RANGE, "BELOW_FLOOR")
    assert below.metadata == {"pool": "kv", "requested": "1", "floor": "2"}
    assert (large.code, large.reason) == (Code.OUT_OF_RANGE, "TOO_LARGE")
    assert large.metadata == {
        "neededBytes": str((HUGE + 1) * PAGE_BYTES),
        "budgetBytes": str(1 << 40),
        "fixedBytes": "0",
        "kv": str(HUGE),
    }


async def test_an_empty_target_is_a_bad_field() -> None:
    async with serving() as it:
        failed = await failure(it.rebuild.Rebuild(RebuildRequest()))
    assert (failed.code, failed.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert failed.fields == ["target"]


async def test_a_plan_touches_nothing() -> None:
    async with serving() as it:
        before = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
        request = RebuildRequest(target=PoolSizes(kv_pages=64), validate_only=True)
        reply = await it.rebuild.Rebuild(request)
        assert await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest()) == before
    assert reply.current == PoolSizes(kv_pages=64)
    assert reply.plan.needed_bytes == 65 * PAGE_BYTES
    assert reply.plan.budget_bytes == 1 << 40
    assert not reply.busy
    assert not reply.stage_times


async def test_a_rebuild_tells_what_it_did() -> None:
    async with serving() as it:
        await it.collect(GenerateRequest(text="hello", max_tokens=2))
        request = RebuildRequest(target=PoolSizes(kv_pages=64), request_id="mine")
        reply = await it.rebuild.Rebuild(request)
        pools = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
        assert await it.status() == health_pb2.HealthCheckResponse.SERVING
        await it.collect(GenerateRequest(text="hello", max_tokens=2))
    assert reply.request_id == pools.last_request_id == "mine"
    assert reply.current == PoolSizes(kv_pages=64)
    assert pools.pools[0].size == 64
    assert pools.state == rebuild_pb2.REBUILD_STATE_SERVING
    assert pools.budget_bytes == 1 << 40
    assert len(reply.kept.slot_ids) == 1
    assert reply.kept.prefix_tokens > 0
    assert not reply.prefix_cache_dropped
    assert not reply.erased_slot_ids
    stages = [time.stage for time in reply.stage_times]
    assert stages == list(range(1, 9))


async def test_a_minted_id_is_told() -> None:
    async with serving() as it:
        reply = await it.rebuild.Rebuild(ask(kv_pages=64))
    assert reply.request_id


async def test_not_idle_is_busy_without_a_drain_and_a_drain_waits() -> None:
    # A context that the answer cannot have filled before it is cancelled.
    config = replace(CONFIG, context_tokens=1 << 15)
    async with serving(config=config) as it:
        stream = it.generation.Generate(GenerateRequest(text="hello", ignore_eos=True))
        await stream.read()
        busy = await failure(it.rebuild.Rebuild(ask(kv_pages=HUGE)))
        plan = await it.rebuild.Rebuild(
            RebuildRequest(target=PoolSizes(kv_pages=64), validate_only=True)
        )
        request = ask(kv_pages=64)
        request.drain_timeout.CopyFrom(duration_pb2.Duration(seconds=60))
        rebuilding = asyncio.ensure_future(it.rebuild.Rebuild(request))
        stream.cancel()
        reply = await rebuilding
    assert (busy.code, busy.reason) == (Code.ABORTED, "POOLS_BUSY")
    assert busy.metadata == {"cause": "requests", "activeRequests": "1"}
    assert plan.busy
    assert reply.current.kv_pages == 64


@pytest.mark.parametrize("times", [1, 2])
async def test_a_fault_is_undone_or_ends_service(times: int) -> None:
    runner = FakeRunner(16 + 4, 16)
    runner.fail_allocations_with = [MemoryError("no memory")] * times
    async with serving(runner=runner) as it:
        failed = await failure(it.rebuild.Rebuild(ask(kv_pages=64)))
        pools = await it.rebuild.GetPools(rebuild_pb2.GetPoolsRequest())
        if times == 1:
            assert failed.reason == "REBUILD_ROLLED_BACK"
            assert pools.state == rebuild_pb2.REBUILD_STATE_SERVING
            await it.collect(GenerateRequest(text="hello", max_tokens=2))
            return
        late = await failure(it.collect(GenerateRequest(text="hello", max_tokens=2)))
        watch = it.health.Watch(health_pb2.HealthCheckRequest(service=READY_SERVICE))
        async with asyncio.timeout(30):
            while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
                pass
    assert failed.code is late.code is Code.INTERNAL
    assert failed.reason == late.reason == "REBUILD_FAILED"
    assert failed.metadata == late.metadata == {"stage": "allocate"}
    assert pools.state == rebuild_pb2.REBUILD_STATE_FAILED
