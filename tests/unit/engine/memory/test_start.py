"""The sizes under a budget: against a brute-force search, and what a refusal says."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidField
from engine.memory.expert_store import ExpertShape
from engine.memory.planner import MemoryPlan, StatePlan, WindowPlan
from engine.memory.split import MemoryLimits, PoolSizes
from engine.memory.start import start_sizes
from engine.types import EngineConfig, PoolKind

EXPERTS = ExpertShape(num_layers=2, num_experts=2, top_k=1, slot_bytes=3)
_UNITS = st.integers(1, 6)


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    """Pages of 4 tokens, for slots of up to 12."""
    window = states = None
    if draw(st.booleans()):
        pages = draw(_UNITS)
        window = WindowPlan(8, 1, pages, floor=draw(st.integers(1, pages)), page_bytes=draw(_UNITS))
    if draw(st.booleans()):
        size = draw(_UNITS)
        states = StatePlan(size, draw(st.integers(1, size)), draw(_UNITS), interval_tokens=4)
    floor = draw(st.integers(2, 4))
    return MemoryPlan(
        slot_context_tokens=draw(st.integers(1, 12)),
        kv_pages=draw(st.integers(floor, 9)),
        page_tokens=4,
        page_bytes=draw(st.integers(0, 5)),
        window=window,
        states=states,
        kv_floor=floor,
    )


def cost(plan: MemoryPlan, kv: int | None, experts: int | None) -> int:
    """The rule in words: every pool with its sink, experts without one."""
    total = 0 if kv is None else (kv + 1) * plan.page_bytes
    total += 0 if experts is None else experts * EXPERTS.slot_bytes
    if plan.window:
        total += (plan.window.pages + 1) * plan.window.page_bytes
    if plan.states:
        total += (plan.states.states + 1) * plan.states.state_bytes
    return total


@given(st.data())
def test_it_is_the_best_that_fits_and_refuses_only_what_cannot(data: st.DataObject) -> None:
    plan, has_experts = data.draw(plans()), data.draw(st.booleans())
    limit, fixed = data.draw(st.integers(0, 120)), data.draw(st.integers(0, 40))
    given_kv = data.draw(st.none() | st.integers(plan.kv_floor, 9))
    given_experts = data.draw(st.none() | st.integers(EXPERTS.floor, EXPERTS.ceiling))
    reserved = data.draw(st.booleans())
    config = EngineConfig(
        12,
        kv_pages=given_kv,
        moe_cache_slots=given_experts if has_experts else None,
        kv_reserve_tokens=plan.kv_floor * 4 if reserved else None,
    )
    has_kv = plan.page_bytes > 0
    kvs = [None] if not has_kv else range(plan.kv_floor, 130) if given_kv is None else [given_kv]
    counts: list[int | None] = [None]
    if has_experts:
        counts = list(range(EXPERTS.floor, EXPERTS.ceiling + 1))
        counts = counts if given_experts is None else [given_experts]
    fitting = [
        (kv, experts)
        for kv, experts in itertools.product(kvs, counts)
        if fixed + cost(plan, kv, experts) <= limit
    ]
    limits = MemoryLimits("toy", fixed, limit)
    experts = EXPERTS if has_experts else None
    if not fitting:
        with pytest.raises(InvalidField, match="memory_budget: "):
            start_sizes(config, plan, limits, experts)
        return
    # The longest request is reserved for where no reserve is given, as far as it can be had.
    wanted = plan.kv_floor if reserved else max(plan.kv_floor, -(-plan.slot_context_tokens // 4))

    def merit(sizes: tuple[int | None, int | None]) -> tuple[int, int, int]:
        kv, count = sizes
        if count == EXPERTS.floor and given_experts is None:
            return (1, count or 0, kv or 0)  # nothing is left to give to the reserve
        keeps = kv is None or given_kv is not None or kv >= wanted
        return (int(keeps), count or 0, kv or 0)

    kv, count = max(fitting, key=merit)
    found = start_sizes(config, plan, limits, experts)
    assert (found.kv, found.moe_cache) == (kv, count)
    assert found.swa == (plan.window.pages if plan.window else None)
    assert found.mamba == (plan.states.states if plan.states else None)


PLAN = MemoryPlan(slot_context_tokens=12, kv_pages=5, page_tokens=4, page_bytes=10)


def test_experts_come_first_after_the_reserve_and_pages_take_the_rest() -> None:
    limits = MemoryLimits("toy", fixed_bytes=100, limit_bytes=100 + 40 + 9 + 12)
    # 4 pages with the sink for 12 tokens, then 4 experts of 3 bytes; a page more fits in what is left?
    assert start_sizes(EngineConfig(12), PLAN, limits, EXPERTS) == PoolSizes(kv=3, moe_cache=4)
    limits = MemoryLimits("toy", 100, 100 + 40 + 9)
    assert start_sizes(EngineConfig(12), PLAN, limits, EXPERTS) == PoolSizes(kv=3, moe_cache=3)
    config = EngineConfig(12, kv_reserve_tokens=8)
    assert start_sizes(config, PLAN, limits, EXPERTS) == PoolSizes(kv=2, moe_cache=4)


def test_a_refusal_names_the_least_budget_and_the_knobs() -> None:
    limits = MemoryLimits("toy", fixed_bytes=100, limit_bytes=130)
    message = (
        "memory_budget: 130 bytes are too few: 100 for weights, adapters and workspace and 36 for "
        "kv_pages 2, moe_cache_slots 2 make 136; allow as many"
    )
    with pytest.raises(InvalidField, match=re.escape(message) + "$"):
        start_sizes(EngineConfig(12), PLAN, limits, EXPERTS)
    with pytest.raises(InvalidField, match=r"make 146; allow as many, or lower kv_pages$"):
        start_sizes(EngineConfig(12, kv_pages=3), PLAN, limits, EXPERTS)


@pytest.mark.parametrize("kind", [PoolKind.SWA, PoolKind.MAMBA])
def test_pools_that_grow_with_the_slots_say_so(kind: PoolKind) -> None:
    window = WindowPlan(8, 1, 9, 9, 10) if kind is PoolKind.SWA else None
    states = StatePlan(9, 9, 10, 4) if kind is PoolKind.MAMBA else None
    plan = MemoryPlan(12, 5, 4, 10, window, states)
    with pytest.raises(InvalidField, match=r"or lower num_slots$"):
        start_sizes(EngineConfig(12), plan, MemoryLimits("toy", 100, 100), None)
