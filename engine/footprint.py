"""How much memory a model will take, by what its file says: pure integers, before anything is read.

An estimate: the weights count as the file has them, and what compiling takes is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.memory.expert_store import ExpertShape
from engine.memory.planner import MemoryPlan
from engine.memory.split import MemoryLimits, PoolSizes, floors_of, shape_of, sizes_of


@dataclass(frozen=True)
class Footprint:
    """Bytes of weights, adapter banks and pools.

    `needed_bytes` with the pools that were asked for, `least_bytes` with the smallest that run.
    """

    needed_bytes: int
    least_bytes: int


def footprint(
    plan: MemoryPlan,
    *,
    weights_bytes: int,
    bank_bytes: int,
    experts: ExpertShape | None = None,
    num_experts: int | None = None,
) -> Footprint:
    """Sums up a model.

    Args:
        plan: Its pools.
        weights_bytes: Of its file, experts included.
        bank_bytes: Of the adapters' banks.
        experts: What its experts are, if there are any.
        num_experts: How many of those are in memory; None is all.
    """
    if experts is None:
        shape = shape_of(plan, MemoryLimits(fixed_bytes=weights_bytes + bank_bytes), None)
        wanted, least = sizes_of(plan, None), floors_of(plan)
    else:
        resident = experts.ceiling if num_experts is None else num_experts
        dense_bytes = max(0, weights_bytes - experts.ceiling * experts.slot_bytes)
        limits = MemoryLimits(fixed_bytes=dense_bytes + bank_bytes)
        shape = shape_of(plan, limits, experts.pool_info(experts.ceiling, 0))
        wanted = sizes_of(plan, resident)
        least = PoolSizes(moe_cache=min(resident, experts.floor)).over(floors_of(plan))
    return Footprint(
        needed_bytes=shape.fixed_bytes(wanted) + shape.needed_bytes(wanted),
        least_bytes=shape.fixed_bytes(least) + shape.needed_bytes(least),
    )
