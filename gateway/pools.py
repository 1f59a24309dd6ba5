"""GET and POST /pools: how memory is split, and its re-split.

Ours alone: llama-server has no such route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import duration_pb2
from kvarts.v1 import rebuild_pb2
from starlette.responses import Response

from gateway.connection import json_response
from gateway.errors import invalid
from gateway.exchange import Exchange
from gateway.fields import members_of
from gateway.peer_json import Json
from gateway.service import answer

SIZES = ("moe_cache_slots", "kv_pages", "mamba_slots", "swa_pages")
_FIELDS = (*SIZES, "validate_only", "drain_timeout", "request_id")
_KINDS = {
    rebuild_pb2.POOL_KIND_KV: "kv",
    rebuild_pb2.POOL_KIND_SWA: "swa",
    rebuild_pb2.POOL_KIND_MAMBA: "mamba",
    rebuild_pb2.POOL_KIND_MOE_CACHE: "moe_cache",
}
_STATES = {
    rebuild_pb2.REBUILD_STATE_SERVING: "serving",
    rebuild_pb2.REBUILD_STATE_DRAINING: "draining",
    rebuild_pb2.REBUILD_STATE_REBUILDING: "rebuilding",
    rebuild_pb2.REBUILD_STATE_FAILED: "failed",
}
_STAGES = {
    value.number: name.removeprefix("REBUILD_STAGE_").lower()
    for name, value in rebuild_pb2.RebuildStage.DESCRIPTOR.values_by_name.items()
}
_MAX_UNITS = 2**64 - 1
# What a duration on the wire holds.
_MAX_SECONDS = 315_576_000_000


async def get_pools(exchange: Exchange) -> Response:
    """GET /pools."""
    backend = exchange.backend
    request = rebuild_pb2.GetPoolsRequest()
    call = backend.service.rebuild.GetPools(request, metadata=backend.metadata)
    return json_response(pools_json(await answer(call)))


async def rebuild_pools(exchange: Exchange) -> Response:
    """POST /pools: an object of sizes, and how to get there.

    Raises:
        ApiError: an unknown key, a value of a wrong type, no size at all, or a refusal.
    """
    connection, backend = exchange.connection, exchange.backend
    request = read_rebuild(members_of(await connection.json()))
    call = backend.service.rebuild.Rebuild(request, metadata=backend.metadata)
    return json_response(rebuilt_json(await connection.while_connected(answer(call))))


def read_rebuild(body: Mapping[str, Any]) -> rebuild_pb2.RebuildRequest:
    """Reads a body; `drain_timeout` is in seconds.

    Raises:
        ApiError: it is refused, naming the key.
    """
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        raise invalid(f'unknown key "{unknown[0][:80]}"; known are {", ".join(_FIELDS)}')
    target = rebuild_pb2.PoolSizes()
    for name in SIZES:
        if body.get(name) is not None:
            setattr(target, name, _units(name, body[name]))
    if not any(target.HasField(name) for name in SIZES):
        raise invalid(f"at least one of {', '.join(SIZES)} is needed")
    request = rebuild_pb2.RebuildRequest(target=target)
    request.validate_only = of_type(body, "validate_only", bool, "a boolean", default=False)
    request.request_id = of_type(body, "request_id", str, "a string", default="")
    if body.get("drain_timeout") is not None:
        request.drain_timeout.CopyFrom(seconds(body["drain_timeout"]))
    return request


def pools_json(reply: rebuild_pb2.GetPoolsResponse) -> Json:
    """All pools and what they may take."""
    members: dict[str, Json] = {
        "pools": [_pool(pool) for pool in reply.pools],
        "budget_bytes": reply.budget_bytes,
        "fixed_bytes": reply.fixed_bytes,
        "state": _STATES.get(reply.state, "unknown"),
        "last_request_id": reply.last_request_id,
    }
    if reply.HasField("prefill_overlap"):
        members["prefill_overlap"] = reply.prefill_overlap
    return members


def rebuilt_json(reply: rebuild_pb2.RebuildResponse) -> Json:
    """What a rebuild did, or would do."""
    plan = reply.plan
    return {
        "previous": _sizes(reply.previous),
        "current": _sizes(reply.current),
        "prefix_cache_dropped": reply.prefix_cache_dropped,
        "erased_slots": list(reply.erased_slot_ids),
        "kept": _held(reply.kept),
        "dropped": _held(reply.dropped),
        "plan": {
            "needed_bytes": plan.needed_bytes,
            "budget_bytes": plan.budget_bytes,
            "fixed_bytes": plan.fixed_bytes,
            "peak_bytes": plan.peak_bytes,
        },
        "busy": reply.busy,
        "elapsed_ms": as_ms(reply.elapsed),
        "stages_ms": {_STAGES[time.stage]: as_ms(time.elapsed) for time in reply.stage_times},
        "request_id": reply.request_id,
    }


def _pool(pool: rebuild_pb2.Pool) -> Json:
    return {
        "kind": _KINDS.get(pool.kind, "unknown"),
        "size": pool.size,
        "free": pool.free,
        "used": pool.used,
        "pinned": pool.pinned,
        "cached": pool.cached,
        "floor": pool.floor,
        "ceiling": pool.ceiling,
        "unit_bytes": pool.unit_bytes,
        "unit_tokens": pool.unit_tokens,
    }


def _sizes(sizes: rebuild_pb2.PoolSizes) -> Json:
    return {name: getattr(sizes, name) for name in SIZES if sizes.HasField(name)}


def _held(held: rebuild_pb2.HeldState) -> Json:
    return {
        "prefix_tokens": held.prefix_tokens,
        "slots": list(held.slot_ids),
        "snapshots": held.snapshots,
        "experts": held.experts,
    }


def as_ms(duration: duration_pb2.Duration) -> float:
    """Milliseconds."""
    return duration.seconds * 1000 + duration.nanos / 1e6


def _units(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(f'"{name}" must be a whole number, got {_shown(value)}')
    if not 0 <= value <= _MAX_UNITS:
        raise invalid(f'"{name}" must be in [0, {_MAX_UNITS}], got {value}')
    return value


def seconds(value: Any) -> duration_pb2.Duration:
    """Reads `drain_timeout`.

    Raises:
        ApiError: it is no number of seconds, or out of range.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(f'"drain_timeout" must be a number of seconds, got {_shown(value)}')
    if not 0 <= value <= _MAX_SECONDS:
        raise invalid(f'"drain_timeout" must be in [0, {_MAX_SECONDS}] seconds, got {value}')
    whole = int(value)
    return duration_pb2.Duration(seconds=whole, nanos=int((value - whole) * 1e9))


def of_type(body: Mapping[str, Any], name: str, kind: type, what: str, *, default: Any) -> Any:
    """Reads a member that may be absent or null.

    Raises:
        ApiError: it is of another type than `kind`, which `what` names.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise invalid(f'"{name}" must be {what}, got {_shown(value)}')
    return value


def _shown(value: Any) -> str:
    return repr(value)[:80]
