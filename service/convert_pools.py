"""Between rebuilds as the engine knows them and `kvarts.v1` messages."""

from __future__ import annotations

from collections.abc import Mapping

from kvarts.v1 import rebuild_pb2

from engine.memory.split import PoolSizes
from engine.rebuild import RebuildReport, RebuildState, Stage
from engine.slots.survivors import HeldState
from service.convert import to_duration

STATES: Mapping[RebuildState, rebuild_pb2.RebuildState.ValueType] = {
    RebuildState.SERVING: rebuild_pb2.REBUILD_STATE_SERVING,
    RebuildState.DRAINING: rebuild_pb2.REBUILD_STATE_DRAINING,
    RebuildState.REBUILDING: rebuild_pb2.REBUILD_STATE_REBUILDING,
    RebuildState.FAILED: rebuild_pb2.REBUILD_STATE_FAILED,
}
_STAGES: Mapping[Stage, rebuild_pb2.RebuildStage.ValueType] = {
    stage: rebuild_pb2.RebuildStage.Value(f"REBUILD_STAGE_{stage.name}") for stage in Stage
}


def to_sizes(sizes: rebuild_pb2.PoolSizes) -> PoolSizes:
    """The sizes of a target; what is absent is left alone."""
    return PoolSizes(
        kv=sizes.kv_pages if sizes.HasField("kv_pages") else None,
        swa=sizes.swa_pages if sizes.HasField("swa_pages") else None,
        mamba=sizes.mamba_slots if sizes.HasField("mamba_slots") else None,
        moe_cache=sizes.moe_cache_slots if sizes.HasField("moe_cache_slots") else None,
    )


def from_sizes(sizes: PoolSizes) -> rebuild_pb2.PoolSizes:
    """The sizes of the pools that there are."""
    return rebuild_pb2.PoolSizes(
        kv_pages=sizes.kv,
        swa_pages=sizes.swa,
        mamba_slots=sizes.mamba,
        moe_cache_slots=sizes.moe_cache,
    )


def from_report(report: RebuildReport) -> rebuild_pb2.RebuildResponse:
    """What a rebuild did, or would do."""
    split = report.split
    return rebuild_pb2.RebuildResponse(
        previous=from_sizes(report.previous),
        current=from_sizes(report.current),
        prefix_cache_dropped=report.dropped.prefix_tokens > 0,
        erased_slot_ids=report.dropped.slot_ids,
        elapsed=to_duration(report.elapsed_s),
        request_id=report.request_id,
        kept=_held(report.kept),
        dropped=_held(report.dropped),
        stage_times=[
            rebuild_pb2.StageTime(stage=_STAGES[stage], elapsed=to_duration(seconds))
            for stage, seconds in report.stages
        ],
        plan=rebuild_pb2.RebuildPlan(
            needed_bytes=split.needed_bytes,
            budget_bytes=split.budget_bytes,
            fixed_bytes=split.fixed_bytes,
            peak_bytes=report.peak_bytes,
        ),
        busy=report.is_busy,
    )


def _held(held: HeldState) -> rebuild_pb2.HeldState:
    return rebuild_pb2.HeldState(
        prefix_tokens=held.prefix_tokens,
        slot_ids=held.slot_ids,
        snapshots=held.snapshots,
        experts=held.experts,
    )
