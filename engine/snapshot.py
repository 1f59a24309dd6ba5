"""The snapshot that lists and metrics read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.memory.pages import PageAllocator
from engine.memory.planner import MemoryPlan
from engine.memory.split import ceilings
from engine.pools import Pools
from engine.scheduler import Scheduler
from engine.scheduling.row import Row
from engine.slots.table import Slot, SlotTable
from engine.types import PoolInfo, PoolKind, SlotInfo, Snapshot


def describe(scheduler: Scheduler, pools: Pools, queue_limit: int) -> Snapshot:
    """Returns the engine's state as one immutable value."""
    table, pages, plan = pools.table, pools.pages, pools.plan
    most = ceilings(*pools.split())
    experts, figures = pools.experts() if pools.experts else (None, None)
    rows = {row.home.slot_id: row for row in scheduler.rows}
    return Snapshot(
        slots=tuple(
            _slot_info(slot, rows.get(slot.slot_id), table.context_tokens) for slot in table.slots
        ),
        pools=(
            *_kv_info(table, pages, plan, most),
            *_swa_info(table, plan, most),
            *_mamba_info(table, plan, most),
            *([replace(experts, ceiling=most[PoolKind.MOE_CACHE])] if experts else []),
        ),
        running=len(rows),
        queued=scheduler.num_waiting,
        queue_limit=queue_limit,
        counters=scheduler.counters,
        host_cache_bytes=table.index.host_tier.used.total,
        experts=figures,
    )


def _slot_info(slot: Slot, row: Row | None, context_tokens: int) -> SlotInfo:
    return SlotInfo(
        slot_id=slot.slot_id,
        state=slot.state,
        context_tokens=context_tokens,
        held_tokens=len(slot.tokens),
        pages=len(slot.pages),
        evaluated_tokens=row.prompt_done - row.cached_tokens if row else 0,
        cached_tokens=row.cached_tokens if row else 0,
        decoded_tokens=len(row.generation.tokens) if row else 0,
        remaining_tokens=row.generation.remaining_tokens if row else -1,
        has_new_line=row.generation.has_new_line if row else False,
        task_id=slot.task_id,
        request=slot.request,
    )


def _kv_info(
    table: SlotTable, pages: PageAllocator, plan: MemoryPlan, most: Mapping[PoolKind, int]
) -> tuple[PoolInfo, ...]:
    """The pages of full attention; where they have no bytes they are no pool."""
    if not plan.page_bytes:
        return ()
    busy, idle = table.page_use()
    return (
        PoolInfo(
            kind=PoolKind.KV,
            size=pages.size,
            free=pages.num_free,
            used=len(busy),
            pinned=len(idle),
            cached=pages.size - pages.num_free - len(busy) - len(idle),
            floor=plan.kv_floor,
            ceiling=most[PoolKind.KV],
            unit_bytes=plan.page_bytes,
            unit_tokens=plan.page_tokens,
        ),
    )


def _swa_info(
    table: SlotTable, plan: MemoryPlan, most: Mapping[PoolKind, int]
) -> tuple[PoolInfo, ...]:
    """The window pool, of models that have one."""
    if plan.window is None or table.windows is None:
        return ()
    size, free = table.windows.pages.size, table.windows.num_free
    used, pinned = table.window_page_use()
    return (
        PoolInfo(
            kind=PoolKind.SWA,
            size=size,
            free=free,
            used=used,
            pinned=pinned,
            cached=size - free - used - pinned,
            floor=plan.window.floor,
            ceiling=most[PoolKind.SWA],
            unit_bytes=plan.window.page_bytes,
            unit_tokens=plan.page_tokens,
        ),
    )


def _mamba_info(
    table: SlotTable, plan: MemoryPlan, most: Mapping[PoolKind, int]
) -> tuple[PoolInfo, ...]:
    """The states of recurrent layers, of models that have them."""
    if plan.states is None or table.states is None:
        return ()
    size, cached = table.states.size, table.states.num_snapshots
    used = sum(not slot.is_idle for slot in table.slots)
    pinned = sum(slot.is_idle and bool(slot.tokens) for slot in table.slots)
    return (
        PoolInfo(
            kind=PoolKind.MAMBA,
            size=size,
            free=size - used - pinned - cached,
            used=used,
            pinned=pinned,
            cached=cached,
            floor=plan.states.floor,
            ceiling=most[PoolKind.MAMBA],
            unit_bytes=plan.states.state_bytes,
            unit_tokens=0,
        ),
    )
