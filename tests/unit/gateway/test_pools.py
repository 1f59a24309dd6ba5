"""GET and POST /pools over a scripted RebuildService."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from kvarts.v1 import rebuild_pb2

from tests.unit.gateway.fake_service import FakeService, failing


async def test_pools_are_shown(client: httpx.AsyncClient, service: FakeService):
    service.pools = rebuild_pb2.GetPoolsResponse(
        pools=[
            rebuild_pb2.Pool(
                kind=rebuild_pb2.POOL_KIND_KV, size=10, free=4, used=3, pinned=2, cached=1,
                floor=2, ceiling=40, unit_bytes=8, unit_tokens=32,
            )
        ],
        budget_bytes=-5,
        fixed_bytes=7,
        state=rebuild_pb2.REBUILD_STATE_DRAINING,
        last_request_id="r1",
    )  # fmt: skip
    response = await client.get("/pools")
    assert response.json() == {
        "pools": [
            {
                "kind": "kv", "size": 10, "free": 4, "used": 3, "pinned": 2, "cached": 1,
                "floor": 2, "ceiling": 40, "unit_bytes": 8, "unit_tokens": 32,
            }
        ],
        "budget_bytes": -5,
        "fixed_bytes": 7,
        "state": "draining",
        "last_request_id": "r1",
    }  # fmt: skip
    service.pools.prefill_overlap = False
    assert (await client.get("/pools")).json()["prefill_overlap"] is False


async def test_a_rebuild_is_asked_for_and_told(client: httpx.AsyncClient, service: FakeService):
    reply = service.rebuilt
    reply.previous.kv_pages, reply.current.kv_pages = 10, 20
    reply.current.swa_pages = 0
    reply.erased_slot_ids.append(1)
    reply.kept.prefix_tokens = 64
    reply.plan.budget_bytes = 100
    reply.elapsed.nanos = 1_500_000
    reply.stage_times.add(stage=rebuild_pb2.REBUILD_STAGE_COPY_OUT).elapsed.seconds = 1
    body = {"kv_pages": 20, "validate_only": True, "drain_timeout": 1.5, "request_id": "r"}
    told = (await client.post("/pools", json=body)).json()
    (asked,) = service.rebuilds
    assert asked.target == rebuild_pb2.PoolSizes(kv_pages=20)
    assert (asked.validate_only, asked.request_id) == (True, "r")
    assert (asked.drain_timeout.seconds, asked.drain_timeout.nanos) == (1, 500_000_000)
    assert told["previous"] == {"kv_pages": 10}
    assert told["current"] == {"kv_pages": 20, "swa_pages": 0}
    assert told["erased_slots"] == [1]
    assert told["kept"]["prefix_tokens"] == 64
    assert told["plan"]["budget_bytes"] == 100
    assert told["elapsed_ms"] == 1.5
    assert told["stages_ms"] == {"copy_out": 1000}


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "at least one of moe_cache_slots, kv_pages, mamba_slots, swa_pages is needed"),
    ({"kv_pages": None, "validate_only": True}, "at least one of"),
    ({"kv_page": 5}, 'unknown key "kv_page"'),
    ({"kv_pages": 5.0}, '"kv_pages" must be a whole number, got 5.0'),
    ({"kv_pages": True}, '"kv_pages" must be a whole number, got True'),
    ({"kv_pages": "5"}, "got '5'"),
    ({"kv_pages": -1}, '"kv_pages" must be in [0, 18446744073709551615], got -1'),
    ({"kv_pages": 2**64}, "got 18446744073709551616"),
    ({"kv_pages": 5, "validate_only": 1}, '"validate_only" must be a boolean, got 1'),
    ({"kv_pages": 5, "request_id": 1}, '"request_id" must be a string, got 1'),
    ({"kv_pages": 5, "drain_timeout": "1s"}, '"drain_timeout" must be a number of seconds'),
    ({"kv_pages": 5, "drain_timeout": -1}, '"drain_timeout" must be in [0, 315576000000]'),
]


@pytest.mark.parametrize(("body", "message"), BAD)
async def test_bad_bodies(
    client: httpx.AsyncClient, service: FakeService, body: dict[str, Any], message: str
):
    response = await client.post("/pools", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert not service.rebuilds


async def test_a_refusal_keeps_its_numbers(client: httpx.AsyncClient, service: FakeService):
    message = "kv: 1 is below the floor of 2"
    service.refusals["Rebuild"] = failing(grpc.StatusCode.OUT_OF_RANGE, "BELOW_FLOOR", message)
    response = await client.post("/pools", json={"kv_pages": 1})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message
    assert response.headers["x-kvarts-reason"] == "BELOW_FLOOR"
