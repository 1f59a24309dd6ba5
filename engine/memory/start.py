"""The sizes that an engine starts with under a memory budget, or why it cannot: pure integers.

Without a budget the sizes are those that the context and the slots ask for, all experts resident,
and nothing is compared with the machine. With one, experts come first after a reserve of pages and
pages take the rest.
"""

from __future__ import annotations

from engine.errors import InvalidField
from engine.memory.errors import BelowFloor, TooLarge
from engine.memory.expert_store import ExpertShape
from engine.memory.planner import MemoryPlan, pages_for
from engine.memory.split import (
    Knobs,
    MemoryLimits,
    PoolSizes,
    SplitShape,
    first_split,
    shape_of,
    sizes_of,
)
from engine.types import EngineConfig, PoolKind

_FIELDS = {
    PoolKind.KV: "kv_pages",
    PoolKind.SWA: "swa_pages",
    PoolKind.MAMBA: "mamba_slots",
    PoolKind.MOE_CACHE: "moe_cache_slots",
}


def start_sizes(
    config: EngineConfig, plan: MemoryPlan, limits: MemoryLimits, experts: ExpertShape | None
) -> PoolSizes:
    """Returns the sizes of all pools that there are, within `limits`.

    Args:
        config: The sizes that were given win over the split.
        plan: What is wanted.
        limits: The budget, and what comes off it.
        experts: What the experts are, if there are any.

    Raises:
        InvalidField: What was given, or the least that runs, does not fit.
    """
    pool = experts.pool_info(experts.ceiling, 0) if experts else None
    shape = shape_of(plan, limits, pool)
    wanted = sizes_of(plan, experts.ceiling if experts else None)
    reserve = plan.kv_floor
    if config.kv_reserve_tokens is None:
        # Room for the longest request, where the least that runs leaves it.
        reserve = pages_for(plan.slot_context_tokens, plan.page_tokens)
    given = {
        kind.value: size
        for kind, field in _FIELDS.items()
        if shape.pool(kind) is not None and (size := getattr(config, field)) is not None
    }
    knobs = Knobs(PoolSizes(**given), kv_reserve=reserve)
    try:
        return first_split(shape, wanted, knobs, fills=True).sizes
    except (BelowFloor, TooLarge) as error:
        raise _refusal(shape, knobs, limits) from error


def _refusal(shape: SplitShape, knobs: Knobs, limits: MemoryLimits) -> InvalidField:
    """Names the least budget, and the sizes that could be lowered instead."""
    least = PoolSizes(**{pool.kind.value: pool.floor for pool in shape.pools})
    asked = knobs.given.over(least)
    needed = shape.fixed_bytes(asked) + shape.needed_bytes(asked)
    parts = ", ".join(f"{_FIELDS[kind]} {size}" for kind, size in asked.items())
    own = f"{limits.process_bytes} for the process itself, " if limits.process_bytes else ""
    pools_bytes = needed - limits.fixed_bytes - limits.process_bytes
    text = (
        f"{limits.limit_bytes} bytes are too few: {own}{limits.fixed_bytes} for weights, adapters and "
        f"workspace and {pools_bytes} for {parts} make {needed}; allow as many"
    )
    lower = [_FIELDS[kind] for kind, size in knobs.given.items() if size > (least.get(kind) or 0)]
    if lower:
        text += f", or lower {' or '.join(lower)}"
    elif shape.pool(PoolKind.SWA) or shape.pool(PoolKind.MAMBA):
        text += ", or lower num_slots"
    return InvalidField("memory_budget", text)
