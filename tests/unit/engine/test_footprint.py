"""What a model will take, against sums by hand."""

from __future__ import annotations

from engine.footprint import Footprint, footprint
from engine.memory.expert_store import ExpertShape
from engine.memory.planner import MemoryPlan

PLAN = MemoryPlan(slot_context_tokens=64, kv_pages=20, page_tokens=16, page_bytes=100, kv_floor=4)


def test_weights_banks_and_pages_with_their_sink() -> None:
    assert footprint(PLAN, weights_bytes=5000, bank_bytes=30) == Footprint(
        needed_bytes=5000 + 30 + 21 * 100, least_bytes=5000 + 30 + 5 * 100
    )


def test_experts_count_as_far_as_they_are_in_memory() -> None:
    experts = ExpertShape(num_layers=3, num_experts=4, top_k=2, slot_bytes=200)
    dense = 5000 - 12 * 200
    all_of_them = footprint(PLAN, weights_bytes=5000, bank_bytes=0, experts=experts)
    assert all_of_them.needed_bytes == dense + 12 * 200 + 21 * 100
    assert all_of_them.least_bytes == dense + experts.floor * 200 + 5 * 100
    some = footprint(PLAN, weights_bytes=5000, bank_bytes=0, experts=experts, num_experts=6)
    assert some.needed_bytes == dense + 6 * 200 + 21 * 100
