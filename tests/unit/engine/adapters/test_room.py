"""Banks are counted beside weights and pools before they are made."""

from __future__ import annotations

import pytest

from engine.adapters.capacity import AdapterCapacity
from engine.adapters.room import check_bank_room
from engine.errors import InvalidField
from engine.memory.split import PoolShape, PoolSizes, SplitShape
from engine.types import PoolKind

# 100 of weights, 9 pages and a sink of 10, 5 states and a sink of 3; 400 in all.
SHAPE = SplitShape(
    "toy",
    (PoolShape(PoolKind.KV, 10, floor=2), PoolShape(PoolKind.MAMBA, 3, floor=1)),
    other_fixed_bytes=100,
    limit_bytes=400,
)
SIZES = PoolSizes(kv=9, mamba=5)
LEFT_BYTES = 400 - 100 - 10 * 10 - 6 * 3
CAPACITY = AdapterCapacity(count=3, rank=12)


def test_what_is_left_may_be_taken_to_the_last_byte() -> None:
    check_bank_room(SHAPE, SIZES, CAPACITY, 0)
    check_bank_room(SHAPE, SIZES, CAPACITY, LEFT_BYTES)


@pytest.mark.parametrize("has_experts", [False, True])
def test_a_byte_more_is_refused_with_the_numbers(*, has_experts: bool) -> None:
    capacity = AdapterCapacity(count=3, rank=12, has_experts=has_experts)
    with pytest.raises(InvalidField) as refusal:
        check_bank_room(SHAPE, SIZES, capacity, LEFT_BYTES + 1)
    assert refusal.value.field == "max_adapters"
    message = str(refusal.value)
    assert "3 adapters of rank 16" in message
    assert f"need {LEFT_BYTES + 1} bytes, {LEFT_BYTES} of 400 are left" in message
    assert ("experts" in message) is has_experts


def test_what_does_not_fit_anyway_is_not_the_banks_fault() -> None:
    check_bank_room(SHAPE, PoolSizes(kv=100, mamba=5), CAPACITY, 10**6)
