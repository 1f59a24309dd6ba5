"""Fits the pools of a model that is being loaded into a budget of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.adapters.capacity import AdapterCapacity
from engine.errors import InvalidField
from engine.memory.planner import MemoryPlan
from engine.memory.split import MemoryLimits, PoolSizes, floors_of, with_sizes
from engine.memory.start import start_sizes
from engine.model.spec import ModelSpec
from engine.model.weights import Weights
from engine.pool_programs import RunnerConfig
from engine.runner import JaxRunner
from engine.step import DeviceSizes
from engine.types import EngineConfig


@dataclass(frozen=True)
class Fitted:
    """What fits."""

    plan: MemoryPlan
    weights: Weights


def fit_budget(
    config: EngineConfig,
    spec: ModelSpec,
    plan: MemoryPlan,
    weights: Weights,
    runner_config: Callable[[EngineConfig, MemoryPlan, AdapterCapacity], RunnerConfig],
    capacity: AdapterCapacity,
    on_read: Callable[[int], None],
    process_bytes: int,
) -> Fitted:
    """Splits the budget of `config`, which has one, and gives experts their memory.

    The workspace is measured: the largest steps are compiled for the smallest pools and for those
    that fit beside them. `weights` may hold any number of experts, the fewer the better, since they
    are read anew. `on_read` hears of the bytes of the file that were read. The process
    takes `process_bytes` beside all arrays.

    Raises:
        InvalidField: What was asked for, or the least that runs, does not fit.
        ModelFileError: The file was changed meanwhile.
    """
    assert config.memory_budget is not None
    budget = config.memory_budget
    least = with_sizes(plan, floors_of(plan))
    probe = JaxRunner(spec, weights, runner_config(config, least, capacity))
    view = weights.experts
    shape = view.pool.shape if view else None

    def split(fixed_bytes: int) -> PoolSizes:
        limits = MemoryLimits(spec.architecture, fixed_bytes, budget, process_bytes)
        return start_sizes(config, plan, limits, shape)

    fixed_bytes = probe.fixed_bytes_at(probe.pools.sizes)
    sizes = split(fixed_bytes)
    # A workspace that grows with the pools is no larger for the smaller ones that it leaves.
    more = probe.fixed_bytes_at(_device_sizes(with_sizes(plan, sizes), sizes))
    if more > fixed_bytes:
        fixed_bytes, sizes = more, split(more)
    probe.close()
    if view is not None and sizes.moe_cache is not None:
        weights = _with_experts(spec, weights, sizes.moe_cache, on_read)
    return Fitted(with_sizes(plan, sizes), weights)


def _device_sizes(plan: MemoryPlan, sizes: PoolSizes) -> DeviceSizes:
    return DeviceSizes(
        plan.kv_pages,
        plan.window.pages if plan.window else 0,
        plan.states.states if plan.states else 0,
        sizes.moe_cache or 0,
    )


def _with_experts(
    spec: ModelSpec, weights: Weights, num_slots: int, on_read: Callable[[int], None]
) -> Weights:
    assert weights.experts is not None
    pool = weights.experts.pool
    try:
        pool.resize(num_slots, on_read)
    except MemoryError as error:
        raise InvalidField(
            "memory_budget",
            f"{num_slots} experts of {pool.shape.slot_bytes} bytes do not fit into memory",
        ) from error
    assert pool.view is not None
    return weights.with_experts(spec, pool.view, num_slots)
